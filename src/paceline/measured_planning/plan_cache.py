"""A cache of plans by job. A planner stores its plan, and runs of the job read it to forecast their layout."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError
from paceline.measured_planning.timing.timing_cache import apply_stored_timing
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import candidate_from_layout
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.model_costs.model_profile import ModelProfile, model_profile_from_json
from paceline.planner.search.fallbacks import build_calibrated_forecast
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.profiling.calibration_store import save_plan
from paceline.profiling.machine_benchmarks.this_machine import cached_local_cluster
from paceline.trainer.diagnostics.forecast_lookup import stored_plan_key
from paceline.trainer.setup.prepare import PreparedJob

SOURCE = "plan"
ReplayedBytes = tuple[int, Mapping[str, int]]  # the peak bytes, and the bytes at the peak by kind


def store_plan(
    prepared_job: PreparedJob, profile: ModelProfile, cluster: Cluster, *, replayed: Mapping[str, ReplayedBytes]
) -> None:
    """Store the model's profile, the cluster, and the replayed bytes by candidate."""
    with suppress(PacelineError, OSError):  # the job of a script has no file of its own
        save_plan(
            stored_plan_key(prepared_job),
            {"facts": profile.as_json(), "cluster": cluster.as_json(), "replayed": replayed},
        )


def estimate_for_run(stored: Mapping[str, Any], prepared_job: PreparedJob, *, parameters: int) -> LayoutForecast | None:
    """Return the forecast for a run's layout from the stored plan of its job; None if the plan does not apply.

    The forecast is for this machine if it is benchmarked, else for the cluster of the plan. If the layout was timed on
    this machine, the timed seconds replace the forecast ones. `parameters` is the run's number of trainable elements.
    """
    plan, profile, cluster = (
        prepared_job.plan,
        model_profile_from_json(stored["facts"]),
        cluster_from_json(stored["cluster"]),
    )
    trainable_parameters = profile.parameters - sum(part.frozen_parameters for part in profile.parts)
    if trainable_parameters != parameters or profile.global_batch_size != plan.global_batch_size:
        return None
    if (local_cluster := cached_local_cluster(ranks=plan.mesh.ranks, device=plan.device)) is not None:
        replayed = stored["replayed"] if cluster.device.kind == local_cluster.device.kind else {}
        cluster = local_cluster
    elif cluster.device.kind == plan.device and cluster.ranks == plan.mesh.ranks:
        replayed = stored["replayed"]
    else:
        return None
    precision, forecast = prepared_job.settings.train.precision, CostModel(profile=profile, cluster=cluster)
    candidate = candidate_from_layout(
        plan.asked, plan.mesh, micro_batch_size=plan.micro_batch_size, precision=precision, compiles=profile.compiles
    )
    replayed_bytes = replayed.get(str(candidate))
    return build_calibrated_forecast(
        apply_stored_timing(prepared_job, forecast, forecast.estimate(candidate)),
        forecast,
        source=SOURCE,
        replayed=None if replayed_bytes is None else (int(replayed_bytes[0]), replayed_bytes[1]),
    )
