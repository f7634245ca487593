"""Summarize timed steps: their median, or an extrapolation from two truncated models."""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from paceline.planner.cost.estimate import MeasuredTime

_MIN_STEPS = 4  # from which a spread is computed


def summarize_timings(
    timings: Sequence[tuple[str, int, Sequence[float]]], depths: Sequence[int]
) -> dict[str, MeasuredTime]:
    """Return the step time by candidate: the median, or an extrapolation from the medians of two truncated models.

    `timings` has (candidate, blocks of the timed model, seconds of each step). `depths` are the lengths of the whole
    model's lists of equal blocks.
    """
    seconds_by_depth: dict[str, dict[int, Sequence[float]]] = {}
    for candidate, blocks, seconds in timings:
        seconds_by_depth.setdefault(candidate, {})[blocks] = seconds
    return {candidate: _summarize(by_depth, sum(depths)) for candidate, by_depth in seconds_by_depth.items()}


def _summarize(seconds_by_depth: Mapping[int, Sequence[float]], num_blocks: int) -> MeasuredTime:
    blocks = sorted(seconds_by_depth)
    medians = [median(seconds_by_depth[depth]) for depth in blocks]
    seconds = medians[-1]
    if len(blocks) == 2:
        per_block = (medians[1] - medians[0]) / (blocks[1] - blocks[0])
        seconds += max(0.0, per_block) * (num_blocks - blocks[1])
    return MeasuredTime(
        seconds=seconds,
        spread=_spread(seconds_by_depth[blocks[-1]]),
        steps=sum(map(len, seconds_by_depth.values())),
        blocks=tuple(blocks),
    )


def _spread(seconds: Sequence[float]) -> float:
    """Return half the interquartile range as a fraction of the median; 0 for few steps."""
    if len(seconds) < _MIN_STEPS:
        return 0.0
    low, middle, high = quantiles(seconds, n=4)
    return (high - low) / 2 / middle
