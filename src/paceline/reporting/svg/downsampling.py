"""Downsampling without invented values: every drawn value is a logged value or a mean of logged values."""

import math
from collections.abc import Sequence
from itertools import pairwise

Point = tuple[float, float]
MOST_POINTS = 360
_FEWEST = 24
_RESTLESS = 3.0
_WINDOWS = 30


def is_noisy(points: Sequence[Point]) -> bool:
    """Return whether the values fluctuate much more than they trend."""
    values = [y for _, y in points if math.isfinite(y)]
    if len(values) < _FEWEST:
        return False
    travelled = sum(abs(b - a) for a, b in pairwise(values))
    return travelled > _RESTLESS * (max(values) - min(values))


def window_of(points: Sequence[Point]) -> int:
    """Return the window of the running mean: an odd number of logged values."""
    return 2 * (len(points) // _WINDOWS // 2) + 3


def running_mean(points: Sequence[Point], *, window: int) -> list[Point]:
    """Return the mean of the `window` logged values around each point, fewer at both ends; a gap stays a gap."""
    half = window // 2
    found = []
    for place, (x, y) in enumerate(points):
        around = [v for _, v in points[max(0, place - half) : place + half + 1] if math.isfinite(v)]
        found.append((x, sum(around) / len(around) if math.isfinite(y) else y))
    return found


def value_band(points: Sequence[Point]) -> list[tuple[float, float, float]]:
    """Return (step, lowest, highest) of each stretch of logged values."""
    size = max(1, math.ceil(len(points) / (MOST_POINTS // 3)))
    found = []
    for start in range(0, len(points), size):
        part = [p for p in points[start : start + size + 1] if math.isfinite(p[1])]
        if part:
            values = [y for _, y in part]
            found.append((part[0][0], min(values), max(values)))
    return found


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Return at most a few hundred points: the lowest and the highest of each stretch."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (MOST_POINTS // 2))
    kept = []
    for start in range(0, len(points), size):
        part = [p for p in points[start : start + size] if math.isfinite(p[1])]
        if part:
            low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
            kept += sorted({low, high})
        else:
            kept.append(points[start])
    return kept


def mean_columns(rows: Sequence[tuple[float, Sequence[float]]], *, most: int) -> list[tuple[float, float, list[float]]]:
    """Return (first step, last step, mean of each part) for at most `most` stretches."""
    size = max(1, math.ceil(len(rows) / most))
    found = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        means = [sum(values) / len(part) for values in zip(*(parts for _, parts in part), strict=True)]
        found.append((part[0][0], part[-1][0], means))
    return found
