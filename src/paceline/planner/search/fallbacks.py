"""Find the fallback layouts of a run, which replace its layout if the run is out of memory.

Each fallback needs clearly less memory than the previous one.
"""

from collections.abc import Iterator, Mapping

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.hardware.cluster import family_ratio
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.layout_with_forecast import TIMED, LayoutForecast
from paceline.planner.search.search_space import SearchSpace

_MEMORY_RATIO = 0.85  # the largest memory of a fallback relative to the previous layout, both without the reserve
_MAX_FALLBACKS = 5


def fallback_layouts(cost_model: CostModel, first: Estimate, *, grid: SearchSpace | None = None) -> Iterator[Estimate]:
    """Yield at most five fallbacks of `first`. Each is the fastest that needs clearly less memory than the previous."""
    reserve, previous = cost_model.cluster.device.reserve_bytes, first
    for _ in range(_MAX_FALLBACKS):
        fallback = search(
            cost_model.with_memory_limit(reserve + _MEMORY_RATIO * (previous.peak_bytes - reserve)), grid=grid
        ).fastest
        if fallback is None:
            return
        yield fallback
        previous = fallback


def build_forecast(
    estimate: Estimate, *, time_ratio: float = 1.0, memory_ratio: float = 1.0, source: str = "",
    replayed: tuple[int, Mapping[str, int]] | None = None,
) -> LayoutForecast:  # fmt: skip
    """Return the layout of an estimate with its forecast.

    `time_ratio` and `memory_ratio` are measured values divided by their forecasts. `replayed` are the
    peak bytes that a replay counted and their parts by name, without the reserve; None if the layout was not replayed.
    """
    reserve = estimate.memory.reserve
    parts = {name: round(value) for name, value in estimate.memory.parts.items() if name != "reserve"}
    peak_bytes, counted_parts = replayed or (round(estimate.peak_bytes - reserve), parts)
    return LayoutForecast(
        layout=estimate.layout,
        family=estimate.candidate.family,
        ranks=estimate.candidate.ranks,
        settings=estimate.settings,
        peak_bytes=peak_bytes,
        parts={name: num_bytes for name, num_bytes in counted_parts.items() if num_bytes and name != "total"},
        step_seconds=estimate.step_seconds,
        replayed=replayed is not None,
        longer=time_ratio,
        fuller=1.0 if replayed else memory_ratio,
        source=source,
        seconds={name: value for name, value in estimate.seconds.parts.items() if value},
    )


def build_calibrated_forecast(
    estimate: Estimate, cost_model: CostModel, *, source: str, replayed: tuple[int, Mapping[str, int]] | None = None
) -> LayoutForecast:
    """Return the layout of an estimate with its forecast, and with the ratios of measured to forecast values.

    The ratios come from earlier runs on this cluster. If steps of this layout were timed, the time ratio is also
    multiplied by their measured time divided by the forecast.
    `source` says how the forecast was made; if steps were timed, the source is `TIMED`.
    """
    cluster, family = cost_model.cluster, estimate.candidate.family
    forecast_seconds = cost_model.estimate(estimate.candidate).step_seconds
    return build_forecast(
        estimate,
        replayed=replayed,
        time_ratio=family_ratio(cluster.longer, family) * (estimate.step_seconds / forecast_seconds),
        memory_ratio=family_ratio(cluster.fuller, family),
        source=source if estimate.measured_time is None else TIMED,
    )
