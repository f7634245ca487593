"""The planning process of `--layout auto`, which runs before the workers start: the plan, and its fallbacks."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.task import Task
from paceline.console.formatting import format_size
from paceline.filesystem.atomic_files import write_json
from paceline.job import Job
from paceline.measured_planning.auto_layout import ANSWER, ORIGIN, SECONDS, announce_choice, as_before, to_plan
from paceline.measured_planning.choose_layout import decide
from paceline.measured_planning.finalist_replay import CandidateChecker
from paceline.measured_planning.plan_cache import store_plan
from paceline.measured_planning.plan_local import profile_for_plan
from paceline.measured_planning.profile.probe_job import grid_of
from paceline.measured_planning.timing.timing_cache import timed_here
from paceline.planner.advice.recommendations import Advice
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.search.fallbacks import build_calibrated_fallback, fallback_layouts
from paceline.planner.search.layout_with_forecast import FallbackLayout
from paceline.profiling.machine_benchmarks.this_machine import machine_here
from paceline.trainer.setup.prepare import PreparedJob, prepare


def write_choice(payload: Mapping[str, Any]) -> int:
    """Plan the task's job, and write the layouts to try into the task's run folder."""
    task = Task.from_json(payload)
    fleet, seconds = cluster_from_json(task.options["fleet"]), float(task.options["seconds"])
    write_json(Path(task.run) / ANSWER, layout_choice(prepare(task), fleet, seconds=seconds))
    return 0


def write_model_profile(payload: Mapping[str, Any]) -> int:
    """Write the profile of the job's model into the task's run folder, without a plan."""
    task = Task.from_json(payload)
    ready = prepare(task)
    write_json(Path(task.run) / ANSWER, learnt_here(ready, most_ranks=int(task.options["most_ranks"])))
    return 0


def learnt_here(ready: PreparedJob, *, most_ranks: int) -> dict[str, Any]:
    """Return the model's profile, computed in this process."""
    return {"facts": profile_for_plan(ready, most_ranks=most_ranks).facts.as_json()}


def settled_here(task: Task, *, job: Job) -> Task:
    """Return the task of a `pl.Run` with a layout, planned in this process, because only it has the script's job."""
    kept = as_before(task)
    if kept is not None:
        return kept
    here = machine_here(ranks=task.ranks, device=task.device)
    return announce_choice(task, layout_choice(prepare(to_plan(task), job=job), here.fleet, seconds=SECONDS), here)


def layout_choice(ready: PreparedJob, fleet: Cluster, *, seconds: float) -> dict[str, Any]:
    """Return the layouts to try in order, the recommended one first, with reasons; replays stop after `seconds`.

    Raises:
        LayoutError: nothing fits.
        UsageError: the job's settings exclude a choice.
    """
    began = time.monotonic()
    grid = grid_of(ready.settings, asked="--layout auto")
    learnt = profile_for_plan(ready, most_ranks=fleet.ranks)
    rehearsal = CandidateChecker(ready=learnt.ready, real=ready)
    known = timed_here(ready, CostModel(profile=learnt.facts, cluster=fleet), grid=grid)
    chosen = decide(rehearsal, known.forecast, grid=grid, until=began + seconds, options=known.options)
    best, facts = chosen.advice.recommended, chosen.forecast.profile
    counted = None
    if chosen.best is not None:
        counted = (chosen.best.peak_bytes, chosen.best.parts or {})
        store_plan(learnt.ready, facts, fleet, replayed={str(best.candidate): counted})
    below = known.of(fallback_layouts(chosen.forecast, best, grid=grid))
    rungs = [build_calibrated_fallback(best, known.forecast, source=ORIGIN, replayed=counted)]
    rungs += [build_calibrated_fallback(one, known.forecast, source=ORIGIN) for one in below]
    return {
        "rungs": [rung.as_json() for rung in rungs],
        "case": chosen.advice.case.number,
        "why": "; ".join([chosen.advice.rows[0].time_explanation, *learnt.notes]),
        "second": _second(chosen.advice, rungs),
        "unreplayed": chosen.advice.not_replayed_reason,
        "seconds": time.monotonic() - began,
        "facts": facts.as_json(),
        "cluster": fleet.as_json(),
    }


def _second(advice: Advice, rungs: list[FallbackLayout]) -> str:
    """Return the second-best layout with its distance; without another family, a fallback that needs less memory."""
    others = [row for row in advice.rows[1:] if row.estimate.fits]
    if others:
        return f"{others[0].estimate.candidate}, {others[0].time_explanation}"
    if len(rungs) > 1:
        times = rungs[1].step_seconds / rungs[0].step_seconds
        return f"{rungs[1]}, {times:.2f} times as long, {format_size(rungs[1].peak_bytes)} at most"
    return "nothing else fits"
