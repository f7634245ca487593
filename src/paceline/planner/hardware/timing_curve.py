"""Measured timing curves, seconds by amount: interpolated between points, and fitted by one line with its error."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, log
from statistics import median
from typing import Any

_ROUNDS = 100
_LEAST = 1e-3
_LEAST_END = 0.1
_CLOSE = 0.03  # residuals below this count by their squares; else points hit by chance would hold the line
_GAIN = 1e-9
_MOST_DAMPING = 1e9
_FAR = 200.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured point: `seconds` is the median of repeats; `spread` is their relative median deviation from it."""

    amount: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line `fixed_seconds + amount * each_seconds`, with its error at the worst point and at the median one.

    A residual of 0.2 is a line 1.2 times as high as the measurement, or the other way round.
    """

    fixed_seconds: float
    each_seconds: float
    residual: float
    middle: float

    @property
    def rate(self) -> float:
        """The amount per second for large amounts. Half of it is reached at `half`."""
        return 1 / self.each_seconds

    @property
    def half(self) -> float:
        """The amount that takes as long as the fixed part: rate(amount) = rate * amount / (amount + half)."""
        return self.fixed_seconds * self.rate

    def seconds(self, amount: float) -> float:
        """Return the seconds by the line."""
        return self.fixed_seconds + amount * self.each_seconds


@dataclass(frozen=True, kw_only=True)
class TimingCurve:
    """The measured seconds of amounts, in ascending order; more never takes less."""

    points: tuple[Point, ...]
    line: Line

    @staticmethod
    def of(points: Iterable[Point]) -> "TimingCurve":
        """Return the curve through these points, at least one."""
        own = tuple(sorted(points, key=lambda point: point.amount))
        assert own and own[0].amount > 0 and all(point.seconds > 0 for point in own)
        return TimingCurve(points=_never_less(own), line=fit_line(own))

    def seconds(self, amount: float) -> float:
        """Return the seconds of an amount, linear between the points.

        Below the first point the first slope continues, but at least half of its seconds remain. Beyond the last point
        the slope is the median of three: of the end, of the line and of the mean; it is at least a tenth of the last
        point's seconds per amount.
        """
        first, last = self.points[0], self.points[-1]
        if amount <= first.amount:
            return first.seconds - self._start_slope() * (first.amount - max(amount, 0.0))
        if amount >= last.amount:
            return last.seconds + (amount - last.amount) * self._end_slope()
        at = bisect_left(self.points, amount, key=lambda point: point.amount)
        before, after = self.points[at - 1 : at + 1]
        share = (amount - before.amount) / (after.amount - before.amount)
        return before.seconds + share * (after.seconds - before.seconds)

    def rate(self, amount: float) -> float:
        """Return the amount per second at this amount."""
        return amount / self.seconds(amount)

    @property
    def best_rate(self) -> float:
        """The best rate of all points; for a stream, that of whichever cache it fits."""
        return max(point.amount / point.seconds for point in self.points)

    @property
    def last_rate(self) -> float:
        """The rate of the largest point; for a stream, one that no cache holds."""
        return self.points[-1].amount / self.points[-1].seconds

    @property
    def end_rate(self) -> float:
        """The amount per second beyond the last point."""
        return 1 / self._end_slope()

    def _start_slope(self) -> float:
        if len(self.points) == 1:
            return 0.0
        first, second = self.points[:2]
        slope = (second.seconds - first.seconds) / (second.amount - first.amount)
        return min(slope, first.seconds / 2 / first.amount)

    def _end_slope(self) -> float:
        last = self.points[-1]
        slopes = [self.line.each_seconds, (last.seconds - min(self.line.fixed_seconds, last.seconds)) / last.amount]
        if len(self.points) > 1:
            before = self.points[-2]
            slopes.append((last.seconds - before.seconds) / (last.amount - before.amount))
        return max(median(slopes), _LEAST_END * last.seconds / last.amount)


def fit_line(points: Sequence[Point]) -> Line:
    """Return the line with the smallest relative error, robust against single disturbed points.

    The logarithms of line over measurement are minimised by damped least squares (Marquardt, "An algorithm for
    least-squares estimation of nonlinear parameters", 1963), weighted so that outliers count by their distance, not its
    square.
    """
    first, last = points[0], points[-1]
    slope = last.seconds / last.amount
    if len(points) == 1:
        return _line(points, 0.0, slope)
    starts = ((first.seconds / 2, slope / 2), (first.seconds, slope * _LEAST), (first.seconds * _LEAST, slope))
    found = [_descend(points, log(fixed), log(each)) for fixed, each in starts]
    _, fixed, each = min(found)
    least = _LEAST * min(point.seconds / point.amount for point in points)
    return _line(points, fixed if fixed > _LEAST * first.seconds else 0.0, max(each, least))


def _line(points: Sequence[Point], fixed: float, each: float) -> Line:
    off = [exp(abs(log((fixed + each * point.amount) / point.seconds))) - 1 for point in points]
    return Line(fixed_seconds=fixed, each_seconds=each, residual=max(off), middle=median(off))


def _descend(points: Sequence[Point], p: float, q: float) -> tuple[float, float, float]:
    """Return the final cost and both numbers of the line, from a start at their logarithms."""
    damping, cost = 1e-2, _cost(points, p, q)
    for _ in range(_ROUNDS):
        dp, dq = _move(points, p, q, damping)
        better = _cost(points, p + dp, q + dq)
        if better >= cost:
            damping *= 5
            if damping > _MOST_DAMPING:
                break
            continue
        p, q, gained, cost, damping = p + dp, q + dq, cost - better, better, damping / 3
        if gained < _GAIN * cost:
            break
    return cost, exp(p), exp(q)


def _cost(points: Sequence[Point], p: float, q: float) -> float:
    """Return the total error; a line with an extreme parameter has infinite cost."""
    if max(abs(p), abs(q)) > _FAR:
        return inf
    return sum(hypot(log((exp(p) + exp(q) * each.amount) / each.seconds), _CLOSE) for each in points)


def _move(points: Sequence[Point], p: float, q: float, damping: float) -> tuple[float, float]:
    fixed, each = exp(p), exp(q)
    uu, uv, vv, ur, vr = damping, 0.0, damping, 0.0, 0.0
    for point in points:
        line = fixed + each * point.amount
        r, u, v = log(line / point.seconds), fixed / line, each * point.amount / line
        weight = 1 / hypot(r, _CLOSE)
        uu, uv, vv = uu + weight * u * u, uv + weight * u * v, vv + weight * v * v
        ur, vr = ur + weight * u * r, vr + weight * v * r
    determinant = uu * vv - uv * uv
    return (uv * vr - vv * ur) / determinant, (uv * ur - uu * vr) / determinant


def _never_less(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points with neighbours averaged wherever the larger amount took less time."""
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


def read_curve(found: Mapping[str, Any]) -> TimingCurve:
    """Return the curve that `asdict` wrote.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is not valid.
    """
    points = tuple(Point(**_numbers(point)) for point in found["points"])
    if not points:
        raise ValueError("a curve without points")
    return TimingCurve(points=points, line=Line(**_numbers(found["line"])))


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items()}
