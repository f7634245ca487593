"""Compute the optimal checkpoint interval: the exact one, the approximations of Young and Daly, and in whole steps."""

from math import inf, isfinite, log1p, sqrt

from paceline.errors import UsageError
from paceline.planner.simulation.goodput import FailureModel, goodput


def best_interval(*, hazard: FailureModel) -> float:
    """Return the seconds between checkpoints that maximize the useful time; infinite if the failure rate is 0.

    With λ failures per second, an interval i and a stall s, the useful time has its maximum where
    (1 - λi) e^(λ(i+s)) = 1. The times of restarts and writes do not matter, except that the result is at least the time
    to write a checkpoint. The result is 0 if checkpoints take no time.
    """
    if hazard.rate == 0:
        return inf
    best = _inverse_gap(hazard.stall_seconds * hazard.rate) * hazard.mean_seconds
    return max(best, hazard.write_seconds)


def young_interval(*, hazard: FailureModel) -> float:
    """Return the first-order approximation √(2 s M) (Young 1974), accurate if the stall s is much shorter than M.

    M is `mean_seconds`, the mean time between two failures.
    """
    return sqrt(2 * hazard.stall_seconds * hazard.mean_seconds) if hazard.rate else inf


def daly_interval(*, hazard: FailureModel) -> float:
    """Return the higher-order approximation (Daly 2006); it is `mean_seconds` for stalls at least twice as long."""
    half = hazard.stall_seconds / (2 * hazard.mean_seconds)
    if half >= 1:
        return hazard.mean_seconds
    return young_interval(hazard=hazard) * (1 + sqrt(half) / 3 + half / 9) - hazard.stall_seconds


def best_interval_in_steps(*, hazard: FailureModel, step_seconds: float) -> int:
    """Return the number of whole steps between checkpoints that maximizes the useful time.

    Raises:
        UsageError: the step time is not above 0, or the failure rate is 0, so that no interval is optimal.
    """
    if not (isfinite(step_seconds) and step_seconds > 0):
        raise UsageError(f"step_seconds={step_seconds:g}: a step takes more than 0 seconds.")
    best = best_interval(hazard=hazard)
    if best == inf:
        raise UsageError("nothing ever fails, so there is no best interval.", hint="give a mean_seconds")
    min_steps = max(1, int(hazard.write_seconds // step_seconds))
    min_steps += min_steps * step_seconds < hazard.write_seconds
    nearest = {max(min_steps, int(best // step_seconds) + extra) for extra in (0, 1)}
    return max(nearest, key=lambda steps: goodput(hazard=hazard, interval_seconds=steps * step_seconds).useful)


def _inverse_gap(stall: float) -> float:
    """Return the u in [0, 1) with `_gap(u)` = `stall`, by bisection, because `_gap` is increasing.

    For a stall of λs (see `best_interval`), u is λi.
    """
    if not stall:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if _gap(middle) < stall:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _gap(u: float) -> float:
    """Return -u - log(1 - u). For small u, sum the power series, because the difference would lose digits."""
    if u >= 1:
        return inf
    if u >= 0.01:
        return -u - log1p(-u)
    return sum(u**power / power for power in range(2, 10))
