"""The planning process of `plan`: the job's profile, the search, and replays of the finalists."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.task import Task
from paceline.console.formatting import format_size, plural
from paceline.filesystem.atomic_files import write_json
from paceline.measured_planning.choose_layout import decide, decide_named
from paceline.measured_planning.finalist_replay import CandidateChecker, CheckedCandidate, row_seen
from paceline.measured_planning.plan_cache import store_plan
from paceline.measured_planning.plan_local import LocalMachineRequest, PlannedLayouts, chosen_here, profile_for_plan
from paceline.measured_planning.profile.probe_job import grid_of
from paceline.measured_planning.timing import timing_cache
from paceline.planner.advice.named_layouts import NamedLayouts
from paceline.planner.advice.numeric_options import find_numerics_options, option_lines
from paceline.planner.advice.recommendations import Advice, PlanRow
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.hardware.assumed_rates import assumption_lines, assumptions
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.run_folder.plan_file import write_advice, write_doing
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.checks.parallel_checks import is_small
from paceline.trainer.setup.prepare import PreparedJob, prepare

_MOST_SECONDS = 30.0  # for the profile and replays; a started replay of the recommended layout is finished
_OF_NAMED = 15.0  # at least, for replays of named layouts


def plan(payload: Mapping[str, Any]) -> int:
    """Write the plan to the run folder. If the cluster is this machine's own ranks, every rank calls this."""
    task = Task.from_json(payload)
    ready = prepare(task)
    _plan(task, ready)
    return 0


def _plan(task: Task, ready: PreparedJob) -> None:
    names = list(task.options.get("layouts", ()))
    began = time.monotonic()
    write_doing(Path(task.run), "profiling the model's compute and memory, and finding the layouts it supports")
    if "here" in task.options:
        found = chosen_here(ready, LocalMachineRequest(**task.options["here"]), layouts=names)
        began = time.monotonic()  # timing has its own limit, so it does not count here
    else:
        fleet, grid = cluster_from_json(task.options["fleet"]), grid_of(ready.settings, asked="paceline plan")
        learnt = profile_for_plan(ready, most_ranks=fleet.ranks)
        forecast = CostModel(profile=learnt.facts, cluster=fleet)
        found = PlannedLayouts(learnt=learnt, forecast=forecast, grid=grid, options=())
    if found is not None:
        ranks = found.forecast.cluster.ranks
        write_doing(Path(task.run), f"searching layouts of {plural(ranks, 'rank')}, and replaying the best")
        until = began + _MOST_SECONDS
        decided = partial(_judged, layouts=names) if names else _decided
        found, advice, seen = decided(found, until=until)
        answer = _answer(advice, seen, found)
        answer["timed"] = [_as_timed(one) for one in found.options if one.measured_time is not None]
        answer["others"] = found.others
        write_advice(Path(task.run), answer)
        write_json(RunFolder(Path(task.run)).answer("plan"), answer)
        counted = {name: (one.peak_bytes, one.parts or {}) for name, one in seen.items() if not one.error}
        store_plan(ready, found.forecast.profile, found.forecast.cluster, replayed=counted)
        timing_cache.store_timings(ready, found.forecast, found.options, disturbed=found.others > 0)
        write_doing(Path(task.run), "")


def write_job_profile(payload: Mapping[str, Any]) -> int:
    """Write the job's profile without a plan, for `simulate`."""
    task = Task.from_json(payload)
    found = profile_for_plan(prepare(task), most_ranks=int(task.options["ranks"])).facts
    write_json(RunFolder(Path(task.run)).answer(task.verb), found.as_json())
    return 0


def _decided(chosen: PlannedLayouts, *, until: float) -> tuple[PlannedLayouts, Advice, dict[str, CheckedCandidate]]:
    """Replay the recommended layout, which fits, and as many other rows as time allows."""
    rehearsal = CandidateChecker(ready=chosen.learnt.ready, real=chosen.learnt.real)
    found = decide(
        rehearsal, chosen.forecast, grid=chosen.grid, until=until, options=chosen.options, lost=chosen.lost, others=True
    )
    return (
        replace(chosen, forecast=chosen.forecast.with_profile(found.forecast.profile)),
        found.advice,
        dict(found.seen),
    )


def _judged(
    chosen: PlannedLayouts, *, layouts: Sequence[str], until: float
) -> tuple[PlannedLayouts, NamedLayouts, dict[str, CheckedCandidate]]:
    """Return the named layouts with their timings; the recommended one is replayed, and others as time allows."""
    ready = chosen.learnt.ready
    found, seen = decide_named(
        CandidateChecker(ready=ready, real=chosen.learnt.real),
        chosen.forecast,
        layouts,
        until=max(until, time.monotonic() + _OF_NAMED),
        micro_batch_size=ready.settings.train.micro_batch_size,
        options=chosen.options,
    )
    return chosen, found, seen


def _as_timed(estimate: Estimate) -> dict[str, Any]:
    """Return the record of one layout that was timed here, whether or not it is the best of its family."""
    assert estimate.measured_time is not None
    return {
        "layout": estimate.layout,
        "settings": estimate.settings,
        "step_seconds": estimate.step_seconds,
        **asdict(estimate.measured_time),
    }


def _answer(
    advice: Advice | NamedLayouts, seen: Mapping[str, CheckedCandidate], chosen: PlannedLayouts
) -> dict[str, Any]:
    forecast, facts, fleet = chosen.forecast, chosen.forecast.profile, chosen.forecast.cluster
    rows = [row_seen(row, seen, fleet.device) for row in advice.rows]
    if isinstance(advice, Advice):  # named layouts keep their order
        rows.sort(key=lambda row: (not row.fits, bool(row.refused)))
    advice = replace(advice, rows=tuple(rows))
    lines = [f"{facts.parameters:,} parameters, global batch {facts.global_batch_size}, on {fleet}"]
    lines += [*chosen.learnt.notes, *advice.lines()]
    told = {str(row.estimate.candidate) for row in rows}
    lines += [_lost(name, one, fleet) for name, one in seen.items() if name not in told]
    lines += [f"  {candidate} is not possible: {one.reason}" for candidate, one in chosen.lost.items()]
    lines += _disturbed(chosen.others)
    options = find_numerics_options(forecast, advice.recommended, chosen.grid) if isinstance(advice, Advice) else []
    lines += option_lines(options)
    lines += assumption_lines(fleet, precision=facts.precision, is_offloaded=_is_offloaded(rows))
    lines += _doubts(advice.rows, facts) if isinstance(advice, Advice) else []
    return {
        **advice.as_json(),
        "facts": facts.as_json(),
        "efficiency": forecast.efficiency.as_json(),
        "cluster": fleet.as_json(),
        "options": [option.as_json() for option in options],
        **assumptions(fleet, precision=facts.precision),
        "lines": lines,
    }


def _is_offloaded(rows: Sequence[PlanRow]) -> bool:
    return any(row.estimate.candidate.offload for row in rows)


def _disturbed(others: float) -> Iterator[str]:
    """Yield a note if other programs used the cores while layouts were timed."""
    if others:
        yield f"note: other programs used {others:.0%} of the cores while layouts were timed: without them steps may be"
        yield "  shorter, and a different layout may be the fastest"
        yield "  to do: plan again after they have ended"


def _doubts(rows: Sequence[PlanRow], facts: ModelProfile) -> Iterator[str]:
    """Yield notes on what is not verified about the recommended layout."""
    best = next((row for row in rows if row.fits), None)
    if best is None:
        return
    if not best.replayed:
        yield f"note: {best.estimate.layout} was not replayed: its memory is an estimate"
    parts = " and ".join(axis for axis in ("cp", "ep") if getattr(best.estimate.candidate, axis) > 1)
    if parts and not is_small(facts.parameters) and not best.estimate.measured_time:
        yield f"note: a model of this size is not run with real values here, and {parts} may change its results"
        yield f"  to do: paceline verify JOB --layout {parts.split()[0]}=2 with a smaller model of its kind"


def _lost(name: str, seen: CheckedCandidate, fleet: Cluster) -> str:
    """Return a line about a layout that was rejected on the way to the recommended one."""
    if seen.error:
        return f"  {name} is not possible: {seen.error}"
    held, limit = (
        format_size(round(seen.peak_bytes + fleet.device.reserve_bytes)),
        format_size(round(fleet.device.memory_bytes)),
    )
    return f"  {name} may not fit: {held} of {limit} in replay"
