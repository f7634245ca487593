"""What a run may fall back to: each rung is the quickest layout that needs clearly less memory than the one before."""

from collections.abc import Iterator

from paceline.plan.estimate import Estimate
from paceline.plan.forecast import Forecast
from paceline.plan.grid import Grid
from paceline.plan.search import search

_LESS = 0.85
_MOST = 5


def ladder(forecast: Forecast, first: Estimate, *, grid: Grid | None = None) -> Iterator[Estimate]:
    """Those below `first`, the fullest first, until nothing needs less."""
    reserve, last = forecast.fleet.device.reserve_bytes, first
    for _ in range(_MOST):
        found = search(forecast.below(reserve + _LESS * (last.peak_bytes - reserve)), grid=grid).first
        if found is None:
            return
        yield found
        last = found
