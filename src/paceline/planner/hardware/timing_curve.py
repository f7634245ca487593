"""Interpolate measured times.

A curve gives the seconds of an amount, such as a number of bytes. A line is fitted to the measured points; its distance
from them is the error of the measurement.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, log
from statistics import median
from typing import Any

_MAX_ITERATIONS = 100
# The slope of a fitted line is at least this fraction of the smallest ratio seconds / amount of a point. An intercept
# of at most this fraction of the first point's seconds is replaced by 0.
_MIN_RATIO = 1e-3
_MIN_END_RATIO = 0.1  # the least slope beyond the last point, relative to that point's seconds per amount
# Up to this residual, the cost of a point grows with the square of its residual, and beyond it only in proportion.
_SMALL_RESIDUAL = 0.03
_MIN_GAIN = 1e-9  # the fit ends when the cost improves by a smaller fraction
_MAX_DAMPING = 1e9  # the fit ends when this damping does not improve the cost
_MAX_LOG = 200.0  # the largest logarithm of a parameter of the line


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured point."""

    amount: float
    seconds: float
    """The median of several measurements."""
    spread: float = 0.0
    """The median deviation of the measurements from `seconds`, as a fraction of `seconds`."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line that gives the seconds of an amount. The field names are keys of the probe's file.

    An error of 0.2 means that line and measurement differ by a factor of 1.2.
    """

    fixed_seconds: float
    """The seconds of the amount 0."""
    each_seconds: float
    """The seconds that each unit of the amount adds."""
    residual: float
    """The largest error of a point."""
    middle: float
    """The median error of the points."""

    @property
    def rate(self) -> float:
        """The amount per second that very large amounts approach."""
        return 1 / self.each_seconds

    @property
    def half_rate_amount(self) -> float:
        """The amount h that reaches half of `rate`: an amount a is processed at rate × a / (a + h)."""
        return self.fixed_seconds * self.rate

    def seconds(self, amount: float) -> float:
        """Return the seconds that the line gives for an amount."""
        return self.fixed_seconds + amount * self.each_seconds


@dataclass(frozen=True, kw_only=True)
class TimingCurve:
    """The measured seconds of several amounts, and a line fitted to them."""

    points: tuple[Point, ...]
    """The points by ascending amount. Averages ensure that a larger amount never takes less time."""
    line: Line
    """The line that is fitted to the points, before they are averaged."""

    @staticmethod
    def from_points(points: Iterable[Point]) -> "TimingCurve":
        """Return the curve through these points; at least one is needed."""
        sorted_points = tuple(sorted(points, key=lambda point: point.amount))
        assert sorted_points and sorted_points[0].amount > 0 and all(point.seconds > 0 for point in sorted_points)
        return TimingCurve(points=_monotonic_points(sorted_points), line=fit_line(sorted_points))

    def seconds(self, amount: float) -> float:
        """Return the seconds of an amount, by linear interpolation between the points.

        Below the first point, the slope between the first two points continues, but at least half of the first point's
        seconds remain. Beyond the last point, the slope is the median of three: the slope between the last two points,
        the slope of the fitted line, and the slope from the line's start to the last point. It is at least a tenth of
        the last point's seconds per amount.
        """
        first, last = self.points[0], self.points[-1]
        if amount <= first.amount:
            return first.seconds - self._start_slope() * (first.amount - max(amount, 0.0))
        if amount >= last.amount:
            return last.seconds + (amount - last.amount) * self._end_slope()
        index = bisect_left(self.points, amount, key=lambda point: point.amount)
        lower, upper = self.points[index - 1 : index + 1]
        fraction = (amount - lower.amount) / (upper.amount - lower.amount)
        return lower.seconds + fraction * (upper.seconds - lower.seconds)

    def rate(self, amount: float) -> float:
        """Return the amount per second at this amount."""
        return amount / self.seconds(amount)

    @property
    def best_rate(self) -> float:
        """The highest rate of all points; for memory-bound operations, it may be that of a cache."""
        return max(point.amount / point.seconds for point in self.points)

    @property
    def last_rate(self) -> float:
        """The rate of the largest point; for memory-bound operations, that of the main memory."""
        return self.points[-1].amount / self.points[-1].seconds

    @property
    def end_rate(self) -> float:
        """The amount per second beyond the last point."""
        return 1 / self._end_slope()

    def _start_slope(self) -> float:
        """Return the seconds that each unit of the amount adds below the first point (see `seconds`)."""
        if len(self.points) == 1:
            return 0.0
        first, second = self.points[:2]
        slope = (second.seconds - first.seconds) / (second.amount - first.amount)
        return min(slope, first.seconds / 2 / first.amount)

    def _end_slope(self) -> float:
        """Return the seconds that each unit of the amount adds beyond the last point (see `seconds`)."""
        last = self.points[-1]
        slopes = [self.line.each_seconds, (last.seconds - min(self.line.fixed_seconds, last.seconds)) / last.amount]
        if len(self.points) > 1:
            previous = self.points[-2]
            slopes.append((last.seconds - previous.seconds) / (last.amount - previous.amount))
        return max(median(slopes), _MIN_END_RATIO * last.seconds / last.amount)


def fit_line(points: Sequence[Point]) -> Line:
    """Return the line with the smallest relative error, robust against outliers.

    Damped least squares (Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", 1963) minimise
    the absolute values of log(line / measured seconds) at all points. Weights ensure that the cost of an outlier grows
    in proportion to its distance, not with the square of the distance. `_MIN_RATIO` limits the slope and the intercept.
    """
    first, last = points[0], points[-1]
    slope = last.seconds / last.amount
    if len(points) == 1:
        return _line(points, 0.0, slope)
    starts = ((first.seconds / 2, slope / 2), (first.seconds, slope * _MIN_RATIO), (first.seconds * _MIN_RATIO, slope))
    fits = [_fit_from(points, log(start_intercept), log(start_slope)) for start_intercept, start_slope in starts]
    _, intercept, fitted_slope = min(fits)
    min_slope = _MIN_RATIO * min(point.seconds / point.amount for point in points)
    return _line(points, intercept if intercept > _MIN_RATIO * first.seconds else 0.0, max(fitted_slope, min_slope))


def _line(points: Sequence[Point], intercept: float, slope: float) -> Line:
    errors = [exp(abs(log((intercept + slope * point.amount) / point.seconds))) - 1 for point in points]
    return Line(fixed_seconds=intercept, each_seconds=slope, residual=max(errors), middle=median(errors))


def _fit_from(points: Sequence[Point], p: float, q: float) -> tuple[float, float, float]:
    """Fit a line from a start, and return its cost, its intercept and its slope.

    `p` and `q` are the logarithms of the start's intercept and slope.
    """
    damping, cost = 1e-2, _cost(points, p, q)
    for _ in range(_MAX_ITERATIONS):
        dp, dq = _damped_step(points, p, q, damping)
        new_cost = _cost(points, p + dp, q + dq)
        if new_cost >= cost:
            damping *= 5
            if damping > _MAX_DAMPING:
                break
            continue
        p, q, improvement, cost, damping = p + dp, q + dq, cost - new_cost, new_cost, damping / 3
        if improvement < _MIN_GAIN * cost:
            break
    return cost, exp(p), exp(q)


def _cost(points: Sequence[Point], p: float, q: float) -> float:
    """Return the total error of the line with the intercept e^p and the slope e^q; infinite if either is extreme."""
    if max(abs(p), abs(q)) > _MAX_LOG:
        return inf
    return sum(hypot(log((exp(p) + exp(q) * point.amount) / point.seconds), _SMALL_RESIDUAL) for point in points)


def _damped_step(points: Sequence[Point], p: float, q: float, damping: float) -> tuple[float, float]:
    """Return the changes of `p` and `q` in one damped step, from the weighted 2 × 2 normal equations."""
    intercept, slope = exp(p), exp(q)
    uu, uv, vv, ur, vr = damping, 0.0, damping, 0.0, 0.0
    for point in points:
        line = intercept + slope * point.amount
        residual, u, v = log(line / point.seconds), intercept / line, slope * point.amount / line
        weight = 1 / hypot(residual, _SMALL_RESIDUAL)
        uu, uv, vv = uu + weight * u * u, uv + weight * u * v, vv + weight * v * v
        ur, vr = ur + weight * u * residual, vr + weight * v * residual
    determinant = uu * vv - uv * uv
    return (uv * vr - vv * ur) / determinant, (uv * ur - uu * vr) / determinant


def _monotonic_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points with neighbours averaged where a larger amount took less time (isotonic regression)."""
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


def read_curve(stored: Mapping[str, Any]) -> TimingCurve:
    """Return the curve from the dict that `dataclasses.asdict` made of it.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is not valid.
    """
    points = tuple(Point(**_floats(point)) for point in stored["points"])
    if not points:
        raise ValueError("a curve without points")
    return TimingCurve(points=points, line=Line(**_floats(stored["line"])))


def _floats(stored: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in stored.items()}
