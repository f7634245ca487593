"""What a run may fall back to: each rung is the quickest layout that needs clearly less memory than the one before."""

from collections.abc import Iterator, Mapping

from paceline.plan.estimate import Estimate
from paceline.plan.forecast import Forecast
from paceline.plan.grid import Grid
from paceline.plan.hardware import of_family
from paceline.plan.rung import TIMED, Rung
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


def rung_of(
    estimate: Estimate, *, longer: float = 1.0, fuller: float = 1.0, source: str = "",
    replayed: tuple[int, Mapping[str, int]] | None = None,
) -> Rung:  # fmt: skip
    """Of an estimate; `replayed` are bytes that a replay has counted, and their parts."""
    reserve = estimate.memory.reserve
    parts = {name: round(value) for name, value in estimate.memory.parts.items() if name != "reserve"}
    counted, own = replayed or (round(estimate.peak_bytes - reserve), parts)
    return Rung(
        layout=estimate.layout,
        family=estimate.candidate.family,
        ranks=estimate.candidate.ranks,
        settings=estimate.settings,
        peak_bytes=counted,
        parts={name: num_bytes for name, num_bytes in own.items() if num_bytes and name != "total"},
        step_seconds=estimate.step_seconds,
        replayed=replayed is not None,
        longer=longer,
        fuller=1.0 if replayed else fuller,
        source=source,
        seconds={name: value for name, value in estimate.seconds.parts.items() if value},
    )


def rung_here(
    estimate: Estimate, forecast: Forecast, *, source: str, replayed: tuple[int, Mapping[str, int]] | None = None
) -> Rung:
    """With what it was corrected by: from runs here before, and by steps that were timed, which are then its source."""
    fleet, family = forecast.fleet, estimate.candidate.family
    reckoned = forecast.estimate(estimate.candidate).step_seconds
    return rung_of(
        estimate,
        replayed=replayed,
        longer=of_family(fleet.longer, family) * (estimate.step_seconds / reckoned),
        fuller=of_family(fleet.fuller, family),
        source=source if estimate.timed is None else TIMED,
    )
