"""The planning process of `--layout auto`: choose a layout and its fallbacks before the workers start."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.task import Task
from paceline.console.formatting import format_size
from paceline.filesystem.atomic_files import write_json
from paceline.job import Job
from paceline.measured_planning.auto_layout import (
    CHOICE_FILE,
    ORIGIN,
    PLANNING_SECONDS,
    make_planning_task,
    print_choice,
    restore_auto_layout,
)
from paceline.measured_planning.choose_layout import choose_layout
from paceline.measured_planning.finalist_replay import CandidateChecker
from paceline.measured_planning.plan_cache import store_plan
from paceline.measured_planning.plan_local import profile_for_plan
from paceline.measured_planning.profile.prepare_profiling import make_search_space
from paceline.measured_planning.timing.timing_cache import load_timings
from paceline.planner.advice.recommendations import Advice
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.search.fallbacks import build_calibrated_forecast, fallback_layouts
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.profiling.machine_benchmarks.this_machine import benchmark_local_machine
from paceline.trainer.setup.prepare import PreparedJob, prepare


def write_choice(payload: Mapping[str, Any]) -> int:
    """Write the result of `choose_layouts_to_try` for the task's job into the task's run folder."""
    task = Task.from_json(payload)
    cluster, seconds = cluster_from_json(task.options["fleet"]), float(task.options["seconds"])
    write_json(Path(task.run) / CHOICE_FILE, choose_layouts_to_try(prepare(task), cluster, seconds=seconds))
    return 0


def write_model_profile(payload: Mapping[str, Any]) -> int:
    """Write the profile of the job's model into the task's run folder, without a plan."""
    task = Task.from_json(payload)
    prepared_job = prepare(task)
    write_json(
        Path(task.run) / CHOICE_FILE, compute_model_profile(prepared_job, max_ranks=int(task.options["most_ranks"]))
    )
    return 0


def compute_model_profile(prepared_job: PreparedJob, *, max_ranks: int) -> dict[str, Any]:
    """Return the model's profile as JSON under the key `facts`. Compute it in this process."""
    return {"facts": profile_for_plan(prepared_job, max_ranks=max_ranks).profile.as_json()}


def plan_script_task(task: Task, *, job: Job) -> Task:
    """Return the task of a `pl.Run` with a layout: that of the resumed run, else one that is planned in this process.

    No other process can plan it, because only the script has the job.
    """
    resumed = restore_auto_layout(task)
    if resumed is not None:
        return resumed
    machine = benchmark_local_machine(ranks=task.ranks, device=task.device)
    return print_choice(
        task,
        choose_layouts_to_try(prepare(make_planning_task(task), job=job), machine.cluster, seconds=PLANNING_SECONDS),
        machine,
    )


def choose_layouts_to_try(prepared_job: PreparedJob, cluster: Cluster, *, seconds: float) -> dict[str, Any]:
    """Return the layouts to try as `rungs`, the recommended one first, with the explanations to print.

    Layouts are replayed, the best one first, until one fits. After `seconds` and a dozen layouts that were refused or
    did not fit, the next layout is recommended without a replay.

    Raises:
        LayoutError: nothing fits.
        UsageError: a setting excludes automatic layouts.
    """
    start_time = time.monotonic()
    grid = make_search_space(prepared_job.settings, command="--layout auto")
    profiled_job = profile_for_plan(prepared_job, max_ranks=cluster.ranks)
    checker = CandidateChecker(ready=profiled_job.ready, original=prepared_job)
    timings = load_timings(prepared_job, CostModel(profile=profiled_job.profile, cluster=cluster), grid=grid)
    choice = choose_layout(checker, timings.forecast, grid=grid, deadline=start_time + seconds, options=timings.options)
    best, profile = choice.advice.recommended, choice.forecast.profile
    replayed = None
    if choice.best is not None:
        replayed = (choice.best.peak_bytes, choice.best.parts or {})
        store_plan(profiled_job.ready, profile, cluster, replayed={str(best.candidate): replayed})
    fallbacks = timings.apply_timings(fallback_layouts(choice.forecast, best, grid=grid))
    layouts = [build_calibrated_forecast(best, timings.forecast, source=ORIGIN, replayed=replayed)]
    layouts += [build_calibrated_forecast(estimate, timings.forecast, source=ORIGIN) for estimate in fallbacks]
    return {
        "rungs": [layout.as_json() for layout in layouts],
        "case": choice.advice.case.number,  # what fits on one device: one of the three cases in docs/plan.md
        "why": "; ".join([choice.advice.rows[0].time_explanation, *profiled_job.notes]),
        "second": _second_choice_text(choice.advice, layouts),
        "unreplayed": choice.advice.not_replayed_reason,
        "seconds": time.monotonic() - start_time,
        "facts": profile.as_json(),
        "cluster": cluster.as_json(),
    }


def _second_choice_text(advice: Advice, layouts: list[LayoutForecast]) -> str:
    """Return a text about the best layout of another family or, without one, about the first fallback."""
    other_families = [row for row in advice.rows[1:] if row.estimate.fits]
    if other_families:
        return f"{other_families[0].estimate.candidate}, {other_families[0].time_explanation}"
    if len(layouts) > 1:
        ratio = layouts[1].step_seconds / layouts[0].step_seconds
        return f"{layouts[1]}, {ratio:.2f} times as long, {format_size(layouts[1].peak_bytes)} at most"
    return "nothing else fits"
