"""Downsampling for charts: every drawn value is a logged value or a mean of logged values."""

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]
_MAX_POINTS = 360  # of a drawn line
_MIN_POINTS = 24  # a curve with fewer points is never noisy
_NOISY_RATIO = 3.0  # of the total change of the values to their range
_WINDOWS = 30  # about how many windows of the running mean fit side by side in a curve


def is_noisy(points: Sequence[Point]) -> bool:
    """Return True if the total change of the values is several times their range."""
    values = [y for _, y in points if math.isfinite(y)]
    if len(values) < _MIN_POINTS:
        return False
    total_change = sum(abs(b - a) for a, b in pairwise(values))
    return total_change > _NOISY_RATIO * (max(values) - min(values))


def mean_window(points: Sequence[Point]) -> int:
    """Return the window of the running mean: an odd number of logged values."""
    return 2 * (len(points) // _WINDOWS // 2) + 3


def running_mean(points: Sequence[Point], *, window: int) -> list[Point]:
    """Return the mean of `window` values around each point (fewer at both ends); non-finite values remain."""
    half = window // 2
    means = []
    for index, (x, y) in enumerate(points):
        neighbors = [v for _, v in points[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        means.append((x, sum(neighbors) / len(neighbors) if math.isfinite(y) else y))
    return means


def value_band(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    """Return (step, lowest, highest) of each stretch of logged values."""
    size = max(1, math.ceil(len(points) / (_MAX_POINTS // 3)))
    bands = []
    for start in range(0, len(points), size):
        points_in_stretch = [p for p in points[start : start + size + 1] if math.isfinite(p[1])]
        if points_in_stretch:
            values = [y for _, y in points_in_stretch]
            bands.append((points_in_stretch[0][0], min(values), max(values)))
    return bands


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Return at most a few hundred points: the lowest and the highest of each stretch."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / (_MAX_POINTS // 2))
    thinned = []
    for start in range(0, len(points), size):
        finite = [p for p in points[start : start + size] if math.isfinite(p[1])]
        if finite:
            low, high = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
            thinned += sorted({low, high})
        else:
            thinned.append(points[start])
    return thinned


def mean_columns(
    rows: Sequence[tuple[float, Sequence[float]]], *, max_columns: int
) -> list[tuple[float, float, list[float]]]:
    """Return (first step, last step, mean of each part) for at most `max_columns` stretches."""
    size = max(1, math.ceil(len(rows) / max_columns))
    columns = []
    for start in range(0, len(rows), size):
        stretch = rows[start : start + size]
        means = [sum(values) / len(stretch) for values in zip(*(parts for _, parts in stretch), strict=True)]
        columns.append((stretch[0][0], stretch[-1][0], means))
    return columns
