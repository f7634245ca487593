"""A cache of step times that plans have measured. `--layout auto` and the forecast of a run use it.

The key of an entry contains the job, the ranks, the machine, Paceline's version and settings. It leaves out settings
that do not affect the time of a step. It also leaves out the microbatch size, which each timed candidate contains. An
entry is valid as long as the model's profile does not change. Times of ranks on several machines are not stored,
because the links between machines change.
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
from paceline.profiling.calibration_store import read_timings, save_timings
from paceline.profiling.machine_benchmarks.benchmark_cache import cache_file, machine_fingerprint
from paceline.trainer.diagnostics.forecast_lookup import stored_plan_key
from paceline.trainer.setup.prepare import PreparedJob

_SETTINGS_OUTSIDE_KEY = (  # of `train`
    "steps",
    "epochs",
    "samples",
    "tokens",
    "micro_batch_size",
    "check_every",
    "timeout_seconds",
)


@dataclass(frozen=True, kw_only=True)
class CachedTimings:
    """The timings of earlier plans. If there are none, `options` and `timed` are empty.

    `forecast` is the cost model. It excludes the layouts that these plans refused. `options` are the estimates to
    choose from, with measured times where known. `timed` has the measured times by candidate. `typical_ratio` is the
    median ratio of measured to forecast times.
    """

    forecast: CostModel
    options: Sequence[Estimate] = ()
    timed: Mapping[str, MeasuredTime] = field(default_factory=dict)
    typical_ratio: float = 1.0

    def apply_timings(self, estimates: Iterable[Estimate]) -> list[Estimate]:
        """Return the estimates with timed seconds or, if not timed, with forecast seconds times `typical_ratio`."""
        return [apply_measured_time(estimate, self.timed, default_ratio=self.typical_ratio) for estimate in estimates]


def store_timings(
    prepared_job: PreparedJob, forecast: CostModel, options: Sequence[Estimate], *, disturbed: bool = False
) -> None:
    """Store the timed options of a plan, and the refusals in the profile of `forecast`.

    `disturbed` says that other programs used the cores during timing. Disturbed times do not replace stored times.
    """
    timed, launch_info = (
        {str(estimate.candidate): estimate.measured_time for estimate in options if estimate.measured_time is not None},
        LaunchInfo.read(os.environ),
    )
    if not timed or launch_info.local_world_size < launch_info.world_size:
        return
    profile, stored = forecast.profile, _read_timings(prepared_job, forecast)
    if stored is not None:
        profile = replace(profile, refused={**stored[0].refused, **profile.refused})
        timed = _merge_timings(timed, stored[1]) if disturbed else _merge_timings(stored[1], timed)
    with suppress(PacelineError, OSError):  # the job of a script has no file of its own
        record = {"facts": profile.as_json(), "cluster": forecast.cluster.as_json()}
        record |= {"timed": {name: asdict(timing) for name, timing in timed.items()}}
        save_timings(_key(prepared_job, forecast.cluster), record)


def _merge_timings(older: Mapping[str, MeasuredTime], newer: Mapping[str, MeasuredTime]) -> dict[str, MeasuredTime]:
    """Return all times by candidate. A newer time replaces an older one.

    The other older times are scaled by the median ratio of newer to older times, over the candidates that have both.
    """
    ratios = [newer[name].seconds / timing.seconds for name, timing in older.items() if name in newer]
    slowdown = median(ratios) if ratios else 1.0
    return {**{name: replace(timing, seconds=slowdown * timing.seconds) for name, timing in older.items()}, **newer}


def load_timings(prepared_job: PreparedJob, forecast: CostModel, *, grid: SearchSpace) -> CachedTimings:
    """Return the timings of earlier plans of this job on this machine, for layouts that fit and are in `grid`."""
    stored = _read_timings(prepared_job, forecast)
    if stored is None:
        return CachedTimings(forecast=forecast)
    earlier_profile, timed = stored
    forecast = forecast.with_profile(
        replace(forecast.profile, refused={**earlier_profile.refused, **forecast.profile.refused})
    )
    options = shortlist(forecast, grid=grid, extra_candidates=timed)
    timed_options = apply_measured_times(options, timed)
    if not any(estimate.measured_time for estimate in timed_options):
        return CachedTimings(forecast=forecast)
    return CachedTimings(
        forecast=forecast, options=timed_options, timed=timed, typical_ratio=median_time_ratio(options, timed)
    )


def apply_stored_timing(prepared_job: PreparedJob, forecast: CostModel, estimate: Estimate) -> Estimate:
    """Return the estimate with the seconds that an earlier plan measured on this machine, or unchanged if none did."""
    stored = _read_timings(prepared_job, forecast)
    timed = {} if stored is None else stored[1]
    return apply_measured_time(estimate, timed, default_ratio=1.0)


def _read_timings(
    prepared_job: PreparedJob, forecast: CostModel
) -> tuple[ModelProfile, dict[str, MeasuredTime]] | None:
    """Return the stored profile, and the stored timings by candidate.

    Return None if nothing is stored, or if the profile or the machine has changed.
    """
    try:
        stored = read_timings(_key(prepared_job, forecast.cluster))
        if stored is None:
            return None
        profile, cluster, timed = (
            model_profile_from_json(stored["facts"]),
            cluster_from_json(stored["cluster"]),
            parse_measured_times(stored["timed"]),
        )
    except (PacelineError, OSError, KeyError, TypeError, ValueError, AttributeError):
        return None
    is_same_model = replace(profile, refused={}) == replace(forecast.profile, refused={})
    return (profile, timed) if is_same_model and _is_same_device(cluster, forecast.cluster) else None


def _is_same_device(first: Cluster, second: Cluster) -> bool:
    """Return whether the devices are the same. Rates are not compared, because a new benchmark may change them."""
    return all(getattr(first.device, name) == getattr(second.device, name) for name in ("name", "kind", "memory_bytes"))


def _key(prepared_job: PreparedJob, cluster: Cluster) -> str:
    settings = prepared_job.settings
    train = {name: value for name, value in asdict(settings.train).items() if name not in _SETTINGS_OUTSIDE_KEY}
    other_settings = [train, asdict(settings.place), asdict(settings.data), settings.log.statistics]
    machine = cache_file(machine_fingerprint(ranks=cluster.ranks, device=cluster.device.kind)).name
    text = json.dumps([stored_plan_key(prepared_job), machine, version("paceline"), other_settings])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
