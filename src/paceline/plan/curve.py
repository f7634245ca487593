"""Seconds by amount, as they were measured: read between the points, and as one line with how far it is off."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_ROUNDS = 60
_LEAST = 1e-3  # of the line's slope through the last point: a curve that is flat has a rate all the same
_CLOSE = 1e-3  # residuals below this count alike, or the points that happen to be met would hold the line


@dataclass(frozen=True, kw_only=True)
class Point:
    """`seconds` is the middle of several repeats; `spread` is their median distance from it, as a share of it."""

    amount: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """`fixed_seconds + amount * each_seconds`. `residual` is the worst `|line / measured - 1|`, `middle` the median."""

    fixed_seconds: float
    each_seconds: float
    residual: float
    middle: float

    @property
    def rate(self) -> float:
        """Amount a second, where the amount is large. Half of it is had at `half`."""
        return 1 / self.each_seconds

    @property
    def half(self) -> float:
        """The amount that takes as long as what is fixed: rate(amount) = rate * amount / (amount + half)."""
        return self.fixed_seconds * self.rate

    def seconds(self, amount: float) -> float:
        """As the line has it."""
        return self.fixed_seconds + amount * self.each_seconds


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What amounts took, the smallest first; more never takes less."""

    points: tuple[Point, ...]
    line: Line

    @staticmethod
    def of(points: Iterable[Point]) -> "Curve":
        """Through at least one point."""
        own = tuple(sorted(points, key=lambda point: point.amount))
        assert own and own[0].amount > 0 and all(point.seconds > 0 for point in own)
        return Curve(points=_never_less(own), line=fit(own))

    def seconds(self, amount: float) -> float:
        """Straight from point to point; beyond them on with the slope of the end, the line or the mean: the middle."""
        first, last = self.points[0], self.points[-1]
        if amount <= first.amount:
            fixed = min(self.line.fixed_seconds, first.seconds)
            return fixed + (first.seconds - fixed) * max(amount, 0) / first.amount
        if amount >= last.amount:
            return last.seconds + (amount - last.amount) * self._end_slope()
        at = bisect_left(self.points, amount, key=lambda point: point.amount)
        before, after = self.points[at - 1 : at + 1]
        share = (amount - before.amount) / (after.amount - before.amount)
        return before.seconds + share * (after.seconds - before.seconds)

    def rate(self, amount: float) -> float:
        """Amount a second at this amount."""
        return amount / self.seconds(amount)

    @property
    def best_rate(self) -> float:
        """Of all points: of a stream, in whichever cache it fits."""
        return max(point.amount / point.seconds for point in self.points)

    @property
    def last_rate(self) -> float:
        """Of the largest point: of a stream, where no cache holds it."""
        return self.points[-1].amount / self.points[-1].seconds

    def _end_slope(self) -> float:
        last = self.points[-1]
        slopes = [self.line.each_seconds, (last.seconds - min(self.line.fixed_seconds, last.seconds)) / last.amount]
        if len(self.points) > 1:
            before = self.points[-2]
            slopes.append((last.seconds - before.seconds) / (last.amount - before.amount))
        return median(slopes)


def fit(points: Sequence[Point]) -> Line:
    """The line whose relative residuals are least in sum: one point that was disturbed does not draw it.

    Least absolute deviations by weights that are set again and again (Schlossmacher, "An iterative technique for
    absolute deviations curve fitting", 1973). Neither number is below zero.
    """
    weights = [1.0] * len(points)
    fixed, each = 0.0, 0.0
    for _ in range(_ROUNDS):
        fixed, each = _weighted(points, weights)
        off = [abs((fixed + each * point.amount) / point.seconds - 1) for point in points]
        weights = [1 / max(one, _CLOSE) for one in off]
    off = [abs((fixed + each * point.amount) / point.seconds - 1) for point in points]
    return Line(fixed_seconds=fixed, each_seconds=each, residual=max(off), middle=median(off))


def _weighted(points: Sequence[Point], weights: Sequence[float]) -> tuple[float, float]:
    """Least squares of `fixed * u + each * v = 1`, where u is one by seconds and v amount by seconds."""
    rows = [(1 / p.seconds, p.amount / p.seconds, w) for p, w in zip(points, weights, strict=True)]
    uu, uv, vv = (
        sum(w * u * u for u, _, w in rows),
        sum(w * u * v for u, v, w in rows),
        sum(w * v * v for _, v, w in rows),
    )
    u1, v1 = sum(w * u for u, _, w in rows), sum(w * v for _, v, w in rows)
    determinant = uu * vv - uv * uv
    if determinant <= 1e-12 * uu * vv:
        return 0.0, v1 / vv
    fixed, each = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
    if fixed < 0:
        return 0.0, v1 / vv
    least = _LEAST * min(point.seconds / point.amount for point in points)
    return (max(0.0, (u1 - least * uv) / uu), least) if each < least else (fixed, each)


def _never_less(points: Sequence[Point]) -> tuple[Point, ...]:
    """Neighbours of which the larger took less are given their mean, until none is left."""
    pools: list[list[Point]] = []
    for point in points:
        pools.append([point])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return tuple(
        Point(amount=point.amount, seconds=_mean(pool), spread=point.spread) for pool in pools for point in pool
    )


def _mean(pool: Sequence[Point]) -> float:
    return sum(point.seconds for point in pool) / len(pool)


def read_curve(found: Mapping[str, Any]) -> Curve:
    """What `asdict` made of it."""
    return Curve(points=tuple(Point(**point) for point in found["points"]), line=Line(**found["line"]))
