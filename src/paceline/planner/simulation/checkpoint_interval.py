"""The best distance between checkpoints: exactly, by the papers' approximations, and in whole steps."""

from math import ceil, inf, isfinite, log1p, sqrt

from paceline.errors import UsageError
from paceline.planner.simulation.goodput import FailureModel, goodput


def best_interval(*, hazard: FailureModel) -> float:
    """The seconds of training between checkpoints that leave most of it useful; infinite where nothing ever fails.

    The derivative of `goodput` is 0 where (1 - λi) e^(λ(i+s)) = 1, whatever restarts and writes take; before, more is
    better, after, less is. Never shorter than a checkpoint is being written; 0 where checkpoints cost nothing.
    """
    if hazard.rate == 0:
        return inf
    best = _root(hazard.stall_seconds * hazard.rate) * hazard.mean_seconds
    return max(best, hazard.write_seconds)


def young(*, hazard: FailureModel) -> float:
    """The first approximation, √(2 s M): Young 1974. Too long for stalls that are not short beside M."""
    return sqrt(2 * hazard.stall_seconds * hazard.mean_seconds) if hazard.rate else inf


def daly(*, hazard: FailureModel) -> float:
    """The higher-order approximation: Daly 2006; M where a stall takes two of them or more."""
    half = hazard.stall_seconds / (2 * hazard.mean_seconds)
    if half >= 1:
        return hazard.mean_seconds
    return young(hazard=hazard) * (1 + sqrt(half) / 3 + half / 9) - hazard.stall_seconds


def in_steps(*, hazard: FailureModel, step_seconds: float) -> int:
    """The best number of whole steps between checkpoints.

    Raises:
        UsageError: a step of no time, or nothing ever fails, so that no number is best.
    """
    if not (isfinite(step_seconds) and step_seconds > 0):
        raise UsageError(f"step_seconds={step_seconds:g}: a step takes a time above 0.")
    best = best_interval(hazard=hazard)
    if best == inf:
        raise UsageError("nothing ever fails: no number of steps is the best one.", hint="give a mean_seconds")
    least = max(1, ceil(hazard.write_seconds / step_seconds))
    least += least * step_seconds < hazard.write_seconds  # the quotient was rounded down to a whole number
    near = {max(least, int(best // step_seconds) + more) for more in (0, 1)}
    return max(near, key=lambda steps: goodput(hazard=hazard, interval_seconds=steps * step_seconds).useful)


def _root(stall: float) -> float:
    """Where -u - log(1 - u), which grows from 0 without end as u goes from 0 to 1, is `stall`: by halving."""
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
    """-u - log(1 - u), by its series where the difference would lose digits."""
    if u >= 1:
        return inf
    if u >= 0.01:
        return -u - log1p(-u)
    return sum(u**power / power for power in range(2, 10))
