"""Fallback layouts of a run: each is the fastest that needs clearly less memory than the one before."""

from collections.abc import Iterator, Mapping

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.hardware.cluster import of_family
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.layout_with_forecast import TIMED, FallbackLayout
from paceline.planner.search.search_space import SearchSpace

_LESS = 0.85
_MOST = 5


def fallback_layouts(forecast: CostModel, first: Estimate, *, grid: SearchSpace | None = None) -> Iterator[Estimate]:
    """Yield the fallbacks below `first`, the fullest first, until no layout needs less memory."""
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
) -> FallbackLayout:  # fmt: skip
    """Return the fallback layout of an estimate; `replayed` are the bytes counted by a replay, and their parts."""
    reserve = estimate.memory.reserve
    parts = {name: round(value) for name, value in estimate.memory.parts.items() if name != "reserve"}
    counted, own = replayed or (round(estimate.peak_bytes - reserve), parts)
    return FallbackLayout(
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
    estimate: Estimate, forecast: CostModel, *, source: str, replayed: tuple[int, Mapping[str, int]] | None = None
) -> FallbackLayout:
    """Return the fallback layout with its corrections.

    The corrections come from earlier runs here and from timed steps; if steps were timed, they are its source.
    """
    fleet, family = forecast.fleet, estimate.candidate.family
    reckoned = forecast.estimate(estimate.candidate).step_seconds
    return rung_of(
        estimate,
        replayed=replayed,
        longer=of_family(fleet.longer, family) * (estimate.step_seconds / reckoned),
        fuller=of_family(fleet.fuller, family),
        source=source if estimate.timed is None else TIMED,
    )
