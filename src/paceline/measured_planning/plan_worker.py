"""The planning process of `paceline plan`: profile the job, search layouts, and replay the finalists."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.task import Task
from paceline.console.formatting import format_size, plural
from paceline.filesystem.atomic_files import write_json
from paceline.measured_planning.choose_layout import choose_layout, choose_named_layouts
from paceline.measured_planning.finalist_replay import CandidateChecker, CheckedCandidate, apply_replay
from paceline.measured_planning.plan_cache import store_plan
from paceline.measured_planning.plan_local import (
    LocalMachineRequest,
    PlannedLayouts,
    plan_local_layouts,
    profile_for_plan,
)
from paceline.measured_planning.profile.prepare_profiling import make_search_space
from paceline.measured_planning.timing import timing_cache
from paceline.planner.advice.named_layouts import NamedLayouts
from paceline.planner.advice.numeric_options import find_numerics_options, option_lines
from paceline.planner.advice.recommendations import Advice, PlanRow
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.hardware.assumed_rates import assumption_lines, assumptions
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.run_folder.plan_file import write_activity, write_advice
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.checks.parallel_checks import is_small_enough
from paceline.trainer.setup.prepare import PreparedJob, prepare

_REPLAY_SECONDS = 30.0  # for profile and replays; the replay of the recommended layout may take longer
_NAMED_REPLAY_SECONDS = 15.0  # for replays of named layouts, however long the profile took


def plan(payload: Mapping[str, Any]) -> int:
    """Write the plan to the run folder.

    If the task's option `here` is set, the plan is for the machines of these ranks, and every rank calls this.
    """
    task = Task.from_json(payload)
    prepared_job = prepare(task)
    _write_plan(task, prepared_job)
    return 0


def _write_plan(task: Task, prepared_job: PreparedJob) -> None:
    names = list(task.options.get("layouts", ()))
    start_time = time.monotonic()
    write_activity(Path(task.run), "profiling the model's compute and memory, and finding the layouts it supports")
    if "here" in task.options:
        planned = plan_local_layouts(prepared_job, LocalMachineRequest(**task.options["here"]), layouts=names)
        start_time = time.monotonic()  # timing has its own limit, so it does not count here
    else:
        cluster = cluster_from_json(task.options["fleet"])
        grid = make_search_space(prepared_job.settings, command="paceline plan")
        profiled_job = profile_for_plan(prepared_job, max_ranks=cluster.ranks)
        forecast = CostModel(profile=profiled_job.profile, cluster=cluster)
        planned = PlannedLayouts(profiled_job=profiled_job, forecast=forecast, grid=grid, options=())
    if planned is not None:
        ranks = planned.forecast.cluster.ranks
        write_activity(Path(task.run), f"searching layouts of {plural(ranks, 'rank')}, and replaying the best")
        deadline = start_time + _REPLAY_SECONDS
        choose = partial(_choose_from_named, layouts=names) if names else _choose_from_search
        planned, advice, replays = choose(planned, deadline=deadline)
        answer = _build_answer(advice, replays, planned)
        answer["timed"] = [_timing_as_json(option) for option in planned.options if option.measured_time is not None]
        answer["others"] = planned.other_cpu_share
        write_advice(Path(task.run), answer)
        write_json(RunFolder(Path(task.run)).answer("plan"), answer)
        replayed = {
            name: (checked.peak_bytes, checked.parts or {}) for name, checked in replays.items() if not checked.error
        }
        store_plan(prepared_job, planned.forecast.profile, planned.forecast.cluster, replayed=replayed)
        timing_cache.store_timings(
            prepared_job, planned.forecast, planned.options, disturbed=planned.other_cpu_share > 0
        )
        write_activity(Path(task.run), "")


def write_job_profile(payload: Mapping[str, Any]) -> int:
    """Write the job's profile without a plan, for `simulate`."""
    task = Task.from_json(payload)
    profile = profile_for_plan(prepare(task), max_ranks=int(task.options["ranks"])).profile
    write_json(RunFolder(Path(task.run)).answer(task.verb), profile.as_json())
    return 0


def _choose_from_search(
    planned: PlannedLayouts, *, deadline: float
) -> tuple[PlannedLayouts, Advice, dict[str, CheckedCandidate]]:
    """Choose the best of the options or of all layouts. Replay it, and as many other rows as time allows.

    Return the planned layouts with refusals added to their profile, the advice, and the replays by candidate.
    """
    checker = CandidateChecker(ready=planned.profiled_job.ready, original=planned.profiled_job.original)
    choice = choose_layout(
        checker,
        planned.forecast,
        grid=planned.grid,
        deadline=deadline,
        options=planned.options,
        rejected=planned.rejected,
        replay_others=True,
    )
    return (
        replace(planned, forecast=planned.forecast.with_profile(choice.forecast.profile)),
        choice.advice,
        dict(choice.replays),
    )


def _choose_from_named(
    planned: PlannedLayouts, *, layouts: Sequence[str], deadline: float
) -> tuple[PlannedLayouts, NamedLayouts, dict[str, CheckedCandidate]]:
    """Choose the best of the named layouts. Replay it, and as many others as time allows.

    Return the planned layouts, the named layouts with their forecasts or timings, and the replays by candidate.
    """
    prepared_job = planned.profiled_job.ready
    named_layouts, replays = choose_named_layouts(
        CandidateChecker(ready=prepared_job, original=planned.profiled_job.original),
        planned.forecast,
        layouts,
        deadline=max(deadline, time.monotonic() + _NAMED_REPLAY_SECONDS),
        micro_batch_size=prepared_job.settings.train.micro_batch_size,
        options=planned.options,
    )
    return planned, named_layouts, replays


def _timing_as_json(estimate: Estimate) -> dict[str, Any]:
    """Return the record of a timed layout for the answer's list `timed`."""
    assert estimate.measured_time is not None
    return {
        "layout": estimate.layout,
        "settings": estimate.settings,
        "step_seconds": estimate.step_seconds,
        **asdict(estimate.measured_time),
    }


def _build_answer(
    advice: Advice | NamedLayouts, replays: Mapping[str, CheckedCandidate], planned: PlannedLayouts
) -> dict[str, Any]:
    forecast, profile, cluster = planned.forecast, planned.forecast.profile, planned.forecast.cluster
    rows = [apply_replay(row, replays, cluster.device) for row in advice.rows]
    if isinstance(advice, Advice):  # named layouts stay in the order of the command
        rows.sort(key=lambda row: (not row.fits, bool(row.refused)))
    advice = replace(advice, rows=tuple(rows))
    lines = [f"{profile.parameters:,} parameters, global batch {profile.global_batch_size}, on {cluster}"]
    lines += [*planned.profiled_job.notes, *advice.lines()]
    shown = {str(row.estimate.candidate) for row in rows}
    lines += [_rejected_layout_line(name, checked, cluster) for name, checked in replays.items() if name not in shown]
    lines += [f"  {candidate} is not possible: {rejection.reason}" for candidate, rejection in planned.rejected.items()]
    lines += _contention_lines(planned.other_cpu_share)
    options = find_numerics_options(forecast, advice.recommended, planned.grid) if isinstance(advice, Advice) else []
    lines += option_lines(options)
    lines += assumption_lines(cluster, precision=profile.precision, is_offloaded=_is_offloaded(rows))
    lines += _unverified_lines(advice.rows, profile) if isinstance(advice, Advice) else []
    return {
        **advice.as_json(),
        "facts": profile.as_json(),
        "efficiency": forecast.efficiency.as_json(),
        "cluster": cluster.as_json(),
        "options": [option.as_json() for option in options],
        **assumptions(cluster, precision=profile.precision),
        "lines": lines,
    }


def _is_offloaded(rows: Sequence[PlanRow]) -> bool:
    return any(row.estimate.candidate.offload for row in rows)


def _contention_lines(other_share: float) -> Iterator[str]:
    """Yield the lines of a note if other programs used the cores while layouts were timed."""
    if other_share:
        yield f"note: other programs used {other_share:.0%} of the cores while layouts were timed"
        yield "  without these programs, steps may be shorter, and another layout may be the fastest"
        yield "  to do: plan again after they have ended"


def _unverified_lines(rows: Sequence[PlanRow], profile: ModelProfile) -> Iterator[str]:
    """Yield notes on properties of the recommended layout that the plan did not check."""
    best = next((row for row in rows if row.fits), None)
    if best is None:
        return
    if not best.replayed:
        yield f"note: {best.estimate.layout} was not replayed: its memory is an estimate"
    parts = " and ".join(axis for axis in ("cp", "ep") if getattr(best.estimate.candidate, axis) > 1)
    if parts and not is_small_enough(profile.parameters) and not best.estimate.measured_time:
        yield f"note: the model is too large to be checked here with real values, and {parts} may change its results"
        yield f"  to do: paceline verify JOB --layout {parts.split()[0]}=2 with a smaller model of the same kind"


def _rejected_layout_line(name: str, replay: CheckedCandidate, cluster: Cluster) -> str:
    """Return a line about a layout that was replayed and is not in the table: why it is not recommended."""
    if replay.error:
        return f"  {name} is not possible: {replay.error}"
    needed, limit = (
        format_size(round(replay.peak_bytes + cluster.device.reserve_bytes)),
        format_size(round(cluster.device.memory_bytes)),
    )
    return f"  {name} may not fit: {needed} of {limit} in replay"
