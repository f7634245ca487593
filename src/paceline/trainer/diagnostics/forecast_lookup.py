"""Look up a run's forecast: from the plan that chose its layout, or from the last stored plan of its job."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.layout import parse_layout
from paceline.filesystem.atomic_files import read_json
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.mesh import layout_label
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.plugins import resolve
from paceline.profiling.calibration_store import plan_key, read_stored_plan
from paceline.trainer.setup.prepare import PreparedJob


def is_forecast_supported(prepared_job: PreparedJob) -> bool:
    """Return True for runs that forecasts cover: synchronous, uncompressed training with one process per rank."""
    plan = prepared_job.plan
    is_plain = plan.update_rule.has_cost_model and plan.compress == "none" and plan.processes == plan.mesh.ranks
    return prepared_job.task.verb == "train" and is_plain


def find_forecast(
    prepared_job: PreparedJob, *, folder: Path, count_parameters: Callable[[], int]
) -> LayoutForecast | None:
    """Return the stored forecast, or None if there is none for this model, layout and batch."""
    plan = prepared_job.plan
    with suppress(Exception):
        saved_forecast = prepared_job.task.options.get("forecast") or _read_saved_forecast(folder)
        if saved_forecast is not None and _matches_plan(forecast := LayoutForecast(**saved_forecast), plan):
            return forecast
    with suppress(Exception):
        stored_plan = read_stored_plan(stored_plan_key(prepared_job))
        if stored_plan is not None:
            # imports the planner only if there is a plan
            forecast = resolve("paceline.measured_planning.plan_cache:estimate_for_run")(
                stored_plan, prepared_job, parameters=count_parameters()
            )
            return forecast if isinstance(forecast, LayoutForecast) else None
    return None


def stored_plan_key(prepared_job: PreparedJob) -> str:
    """Return the key under which plans of this job are stored."""
    settings = prepared_job.settings
    batch = settings.train.global_batch_size or prepared_job.job.global_batch_size
    return plan_key(
        prepared_job.task.job,
        settings=prepared_job.task.settings,
        precision=settings.train.precision,
        global_batch_size=batch,
        compiles=settings.train.compile,
    )


def _read_saved_forecast(folder: Path) -> Any:
    try:
        return read_json(folder / "plan.json").get("forecast")
    except (OSError, ValueError):
        return None


def _matches_plan(forecast: LayoutForecast, plan: ExecutionPlan) -> bool:
    is_same_layout = layout_label(parse_layout(forecast.layout), plan.mesh) == plan.layout
    return is_same_layout and forecast.ranks == plan.mesh.ranks and forecast.micro_batch_size == plan.micro_batch_size
