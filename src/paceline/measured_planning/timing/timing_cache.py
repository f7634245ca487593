"""A cache of the step times that a plan has measured, for later runs of `--layout auto` and for the forecast of a run.

The key contains the job, ranks, machine, Paceline's version and the settings that affect a step's time. An entry is
valid as long as the model's profile is the same. Times of ranks on several machines are not stored, because their
links change.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from statistics import median

from paceline.comm.process_group import LaunchInfo
from paceline.errors import PacelineError
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.model_costs.model_profile import ModelProfile, model_profile_from_json
from paceline.planner.search.search_space import SearchSpace
from paceline.planner.search.shortlist import (
    apply_measured_time,
    apply_measured_times,
    median_time_ratio,
    parse_measured_times,
    shortlist,
)
from paceline.profiling.calibration_store import keep_timed, read_timed
from paceline.profiling.machine_benchmarks.benchmark_cache import cache_file, fingerprint
from paceline.trainer.diagnostics.forecast_lookup import stored_plan_key
from paceline.trainer.setup.prepare import PreparedJob

_NOT_OF_STEPS = ("steps", "epochs", "samples", "tokens", "micro_batch_size", "check_every", "timeout_seconds")


@dataclass(frozen=True, kw_only=True)
class CachedTimings:
    """A forecast without the layouts that were refused during timing, and the timed options, if any."""

    forecast: CostModel
    options: Sequence[Estimate] = ()
    timed: Mapping[str, MeasuredTime] = field(default_factory=dict)
    usual: float = 1.0

    def of(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        """Return the estimates in their order, with their timed seconds, or scaled by the typical error."""
        return [apply_measured_time(one, self.timed, default_ratio=self.usual) for one in estimates]


def store_timings(
    ready: PreparedJob, forecast: CostModel, options: Sequence[Estimate], *, disturbed: bool = False
) -> None:
    """Store the timed options of a plan, and the refusals that are in the profile of `forecast`.

    Times measured while other programs used the cores (`disturbed`) do not replace existing ones.
    """
    timed, place = (
        {str(one.candidate): one.measured_time for one in options if one.measured_time is not None},
        LaunchInfo.read(os.environ),
    )
    if not timed or place.local_world_size < place.world_size:
        return
    facts, before = forecast.profile, _read(ready, forecast)
    if before is not None:
        facts = replace(facts, refused={**before[0].refused, **facts.refused})
        timed = _joined(timed, before[1]) if disturbed else _joined(before[1], timed)
    with suppress(PacelineError, OSError):  # the job of a script has no file of its own
        found = {"facts": facts.as_json(), "cluster": forecast.cluster.as_json()}
        found |= {"timed": {name: asdict(one) for name, one in timed.items()}}
        keep_timed(_key(ready, forecast.cluster), found)


def _joined(under: Mapping[str, MeasuredTime], over: Mapping[str, MeasuredTime]) -> dict[str, MeasuredTime]:
    """Return both sets; older times are scaled by how much slower the machine was in the entries of both sets."""
    ratios = [over[name].seconds / own.seconds for name, own in under.items() if name in over]
    pace = median(ratios) if ratios else 1.0
    return {**{name: replace(own, seconds=pace * own.seconds) for name, own in under.items()}, **over}


def timed_here(ready: PreparedJob, forecast: CostModel, *, grid: SearchSpace) -> CachedTimings:
    """Return the timings of earlier plans of this job on this machine, of layouts that fit and may be chosen now."""
    found = _read(ready, forecast)
    if found is None:
        return CachedTimings(forecast=forecast)
    before, timed = found
    forecast = forecast.with_profile(replace(forecast.profile, refused={**before.refused, **forecast.profile.refused}))
    options = shortlist(forecast, grid=grid, extra_candidates=timed)
    known = apply_measured_times(options, timed)
    if not any(one.measured_time for one in known):
        return CachedTimings(forecast=forecast)
    return CachedTimings(forecast=forecast, options=known, timed=timed, usual=median_time_ratio(options, timed))


def as_timed_here(ready: PreparedJob, forecast: CostModel, estimate: Estimate) -> Estimate:
    """Return the estimate with the seconds that an earlier plan of this job timed on this machine, if any."""
    found = _read(ready, forecast)
    timed = {} if found is None else found[1]
    return apply_measured_time(estimate, timed, default_ratio=1.0)


def _read(ready: PreparedJob, forecast: CostModel) -> tuple[ModelProfile, dict[str, MeasuredTime]] | None:
    """Return the stored profile and timings; None if the profile or the machine has changed."""
    try:
        found = read_timed(_key(ready, forecast.cluster))
        if found is None:
            return None
        facts, fleet, timed = (
            model_profile_from_json(found["facts"]),
            cluster_from_json(found["cluster"]),
            parse_measured_times(found["timed"]),
        )
    except (PacelineError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
    is_job = replace(facts, refused={}) == replace(forecast.profile, refused={})
    return (facts, timed) if is_job and _is_same(fleet, forecast.cluster) else None


def _is_same(one: Cluster, other: Cluster) -> bool:
    """Return whether the devices are the same; timed steps stay valid whatever rates a probe finds."""
    return all(getattr(one.device, name) == getattr(other.device, name) for name in ("name", "kind", "memory_bytes"))


def _key(ready: PreparedJob, fleet: Cluster) -> str:
    settings = ready.settings
    train = {name: value for name, value in asdict(settings.train).items() if name not in _NOT_OF_STEPS}
    rest = [train, asdict(settings.place), asdict(settings.data), settings.log.statistics]
    mark = cache_file(fingerprint(ranks=fleet.ranks, device=fleet.device.kind)).name
    text = json.dumps([stored_plan_key(ready), mark, version("paceline"), rest])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
