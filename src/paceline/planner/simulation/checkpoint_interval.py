"""The best checkpoint interval: exact, by the approximations of the literature, and in whole steps."""

from math import ceil, inf, isfinite, log1p, sqrt

from paceline.errors import UsageError
from paceline.planner.simulation.goodput import FailureModel, goodput


def best_interval(*, hazard: FailureModel) -> float:
    """Return the seconds between checkpoints that maximise useful time; infinite if nothing ever fails.

    The derivative of `goodput` is 0 where (1 - λi) e^(λ(i+s)) = 1, whatever restarts and writes take; below that,
    longer is better, above it, shorter is. The result is at least the time to write a checkpoint; 0 if checkpoints cost
    nothing.
    """
    if hazard.rate == 0:
        return inf
    best = _root(hazard.stall_seconds * hazard.rate) * hazard.mean_seconds
    return max(best, hazard.write_seconds)


def young(*, hazard: FailureModel) -> float:
    """Return the first-order approximation √(2 s M) (Young 1974), too long unless stalls are short relative to M."""
    return sqrt(2 * hazard.stall_seconds * hazard.mean_seconds) if hazard.rate else inf


def daly(*, hazard: FailureModel) -> float:
    """Return the higher-order approximation (Daly 2006); M if a stall takes 2 M or more."""
    half = hazard.stall_seconds / (2 * hazard.mean_seconds)
    if half >= 1:
        return hazard.mean_seconds
    return young(hazard=hazard) * (1 + sqrt(half) / 3 + half / 9) - hazard.stall_seconds


def in_steps(*, hazard: FailureModel, step_seconds: float) -> int:
    """Return the best number of whole steps between checkpoints.

    Raises:
        UsageError: the step time is not above 0, or nothing ever fails, so that no number is best.
    """
    if not (isfinite(step_seconds) and step_seconds > 0):
        raise UsageError(f"step_seconds={step_seconds:g}: a step takes more than 0 seconds.")
    best = best_interval(hazard=hazard)
    if best == inf:
        raise UsageError("nothing ever fails, so there is no best interval.", hint="give a mean_seconds")
    least = max(1, ceil(hazard.write_seconds / step_seconds))
    least += least * step_seconds < hazard.write_seconds  # for a quotient that was rounded down
    near = {max(least, int(best // step_seconds) + more) for more in (0, 1)}
    return max(near, key=lambda steps: goodput(hazard=hazard, interval_seconds=steps * step_seconds).useful)


def _root(stall: float) -> float:
    """Return the u in [0, 1) with -u - log(1 - u) = `stall`, by bisection; the function increases without bound."""
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
    """Return -u - log(1 - u), by its series where the difference would lose digits."""
    if u >= 1:
        return inf
    if u >= 0.01:
        return -u - log1p(-u)
    return sum(u**power / power for power in range(2, 10))
