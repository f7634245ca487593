"""Summary of timed steps: the median, or an extrapolation from two shorter models."""

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from paceline.planner.cost.estimate import MeasuredTime

_LEAST = 4  # for a spread


def summarize_timings(
    looked: Sequence[tuple[str, int, Sequence[float]]], depths: Sequence[int]
) -> dict[str, MeasuredTime]:
    """Return by candidate the median, or the extrapolation from the medians of two shorter models."""
    found: dict[str, dict[int, Sequence[float]]] = {}
    for candidate, blocks, seconds in looked:
        found.setdefault(candidate, {})[blocks] = seconds
    return {candidate: _timed(looks, sum(depths)) for candidate, looks in found.items()}


def _timed(looks: Mapping[int, Sequence[float]], whole: int) -> MeasuredTime:
    blocks = sorted(looks)
    middle = [median(looks[one]) for one in blocks]
    seconds = middle[-1]
    if len(blocks) == 2:
        each = (middle[1] - middle[0]) / (blocks[1] - blocks[0])
        seconds += max(0.0, each) * (whole - blocks[1])
    return MeasuredTime(
        seconds=seconds,
        spread=_spread(looks[blocks[-1]]),
        steps=sum(map(len, looks.values())),
        blocks=tuple(blocks),
    )


def _spread(seconds: Sequence[float]) -> float:
    if len(seconds) < _LEAST:
        return 0.0
    low, middle, high = quantiles(seconds, n=4)
    return (high - low) / 2 / middle
