"""Look up a run's forecast: from the plan that chose its layout, or from the last stored plan of its job."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.layout import parse_layout
from paceline.filesystem.atomic_files import read_json
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.mesh import layout_label
from paceline.planner.search.layout_with_forecast import FallbackLayout
from paceline.plugins import resolve
from paceline.profiling.calibration_store import plan_key, read_plan
from paceline.trainer.setup.prepare import PreparedJob


def can_be_foretold(ready: PreparedJob) -> bool:
    """Return True for runs that forecasts cover: synchronous, uncompressed training with one process per rank."""
    plan = ready.plan
    is_plain = plan.rule.has_cost_model and plan.compress == "none" and plan.processes == plan.mesh.ranks
    return ready.task.verb == "train" and is_plain


def find_forecast(ready: PreparedJob, *, folder: Path, parameters: Callable[[], int]) -> FallbackLayout | None:
    """Return the stored forecast, or None if there is none for this model, layout and batch."""
    plan = ready.plan
    with suppress(Exception):
        given = ready.task.options.get("forecast") or _of_folder(folder)
        if given is not None and _is_of(rung := FallbackLayout(**given), plan):
            return rung
    with suppress(Exception):
        found = read_plan(key_of(ready))
        if found is not None:
            # imports the planner only if there is a plan
            rung = resolve("paceline.measured_planning.plan_cache:estimate_for_run")(
                found, ready, parameters=parameters()
            )
            return rung if isinstance(rung, FallbackLayout) else None
    return None


def key_of(ready: PreparedJob) -> str:
    """Return the key under which plans of this job are stored."""
    settings = ready.settings
    batch = settings.train.global_batch_size or ready.job.global_batch_size
    return plan_key(
        ready.task.job,
        settings=ready.task.settings,
        precision=settings.train.precision,
        global_batch_size=batch,
        compiles=settings.train.compile,
    )


def _of_folder(folder: Path) -> Any:
    try:
        return read_json(folder / "plan.json").get("forecast")
    except (OSError, ValueError):
        return None


def _is_of(rung: FallbackLayout, plan: ExecutionPlan) -> bool:
    same = layout_label(parse_layout(rung.layout), plan.mesh) == plan.layout
    return same and rung.ranks == plan.mesh.ranks and rung.micro_batch_size == plan.micro_batch_size
