"""Advice after out-of-memory: layouts that need less memory, with their cost in time and the command to type."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config.layout import parse_layout
from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.console.formatting import format_duration, format_size, plural
from paceline.console.output import print_line
from paceline.errors import PacelineError
from paceline.filesystem.atomic_files import read_json
from paceline.launch.failures.failure_record import Failure
from paceline.launch.launcher import LaunchRequest, start
from paceline.measured_planning.auto_layout import ANSWER, to_plan
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate, candidate_from_layout
from paceline.planner.hardware.cluster import Cluster, Device, Link
from paceline.planner.layout.host_resources import usable_cores
from paceline.planner.layout.mesh import resolve_mesh
from paceline.planner.model_costs.model_profile import ModelProfile, model_profile_from_json
from paceline.planner.search.fallbacks import build_fallback
from paceline.planner.search.layout_with_forecast import FallbackLayout
from paceline.planner.search.neighbors import Change, cheapest_changes
from paceline.planner.search.search_space import SearchSpace
from paceline.profiling.machine_benchmarks.this_machine import kept_here
from paceline.run_folder.run_folder import RunFolder

LEARN = "paceline.measured_planning.auto_worker:write_model_profile"
_PART = 0.9  # share of the available memory that a restart may need
_LIBRARIES_BYTES = 64 << 20  # needed by training itself: stacks of threads, buffers of libraries
_USUAL = Device(  # one core: only the ratios of its rates are used, and the page says so
    name="a typical processor", kind="cpu", memory_bytes=1e15, flops_per_second={"fp32": 5e10}, bytes_per_second=5e9
)
_LINK = Link(name="memory", latency_seconds=1e-4, bytes_per_second=2e9)


@dataclass(frozen=True, kw_only=True)
class OomAdvice:
    """Lines about the three cheapest changes after which the run would fit; `first_layout` is the cheapest one."""

    lines: tuple[str, ...] = ()
    first: FallbackLayout | None = None


def cheaper_layouts(
    task: Task, failure: Failure, *, learn: Callable[[Task], Mapping[str, Any]], typed: Callable[[FallbackLayout], str]
) -> OomAdvice:
    """Return advice for a run that ran out of memory; empty if its model can't be profiled.

    `command_for` returns the command to type for a layout.
    """
    if not parse_update(task.update).has_cost_model:
        return OomAdvice()
    try:
        facts = model_profile_from_json(learn(task)["facts"])
        candidate = _candidate(task, facts)
        fleet = kept_here(ranks=task.ranks, device=task.device)
        forecast = CostModel(profile=facts, cluster=fleet or _usual(task))
        if (beyond := _beyond_the_forecast(forecast, candidate, failure)) is not None:
            return OomAdvice(lines=(beyond,))
        forecast = _short(forecast, candidate, failure)
        changes = cheapest_changes(forecast, forecast.estimate(candidate), grid=SearchSpace())
    except (PacelineError, OSError, ValueError, KeyError, TypeError):
        return OomAdvice()
    rungs = [build_fallback(change.estimate) for change in changes]
    lines = [*_breakdown(forecast, candidate, failure), *_told(changes, rungs, forecast, candidate, fleet, typed)]
    return OomAdvice(lines=tuple(lines), first=rungs[0] if rungs else None)


def model_profile_of_run(task: Task) -> Mapping[str, Any]:
    """Return the model's profile: from the run's own plan, else from a new process."""
    folder = RunFolder(Path(task.run) / "auto")
    with suppress(OSError, ValueError):
        return dict(read_json(folder.path / ANSWER))
    folder.path.mkdir(parents=True, exist_ok=True)
    print_line("out of memory: searching for layouts that need less", sys.stderr)
    own = replace(to_plan(task), run=str(folder.path), options={"most_ranks": task.ranks})
    start(
        LaunchRequest(
            ranks=1, run=folder, entry=LEARN, payload=own.as_json(), threads=usable_cores(), saves_checkpoints=False
        )
    )
    return dict(read_json(folder.path / ANSWER))


def _candidate(task: Task, facts: ModelProfile) -> Candidate:
    layout = parse_layout(task.layout)
    mesh = resolve_mesh(layout, ranks=task.ranks, problems=[])
    given = task.settings.get("train.micro_batch_size")
    with suppress(OSError, ValueError, KeyError):
        given = read_json(Path(task.run) / "plan.json")["micro_batch_size"]
    share = -(-facts.global_batch_size // mesh.replicas)
    micro = int(given or share)
    return candidate_from_layout(
        layout, mesh, micro_batch_size=micro, precision=facts.precision, compiles=facts.compiles
    )


def _beyond_the_forecast(forecast: CostModel, candidate: Candidate, failure: Failure) -> str | None:
    """Return a line if the failed allocation is larger than the forecast for the whole rank: no layout explains it."""
    whole = forecast.estimate(candidate).peak_bytes
    if failure.requested_bytes <= whole:
        return None
    asked = format_size(failure.requested_bytes)
    return (
        f"No other layout is suggested: this allocation alone ({asked}) is larger than everything that a rank holds by "
        f"forecast ({format_size(round(whole))})."
    )


def _short(forecast: CostModel, candidate: Candidate, failure: Failure) -> CostModel:
    """Return the forecast for devices with the memory that is available here, corrected by the forecast's error."""
    reserve = forecast.cluster.device.reserve_bytes
    forecast_bytes = forecast.estimate(candidate).peak_bytes - reserve
    held: Mapping[str, int] = failure.said.get("held") or {}
    limit, beside = failure.said.get("limit_bytes"), sum(held.get(name, 0) for name in ("rest", "other processes"))
    room = forecast_bytes
    if limit is not None and "rest" in held:
        needed = sum(held.values()) - beside
        own = 0 if forecast.cluster.device.is_accelerator else _LIBRARIES_BYTES
        room = min(room, max(0.0, limit - beside - own) / max(1.0, (needed - own) / forecast_bytes))
    return forecast.with_memory_limit(reserve + _PART * room)


def _breakdown(forecast: CostModel, candidate: Candidate, failure: Failure) -> Iterator[str]:
    """Yield the forecast memory breakdown, if the process could not report its own."""
    if "parameters" in (failure.said.get("held") or {}):
        return
    parts = forecast.estimate(candidate).memory.parts
    yield "forecast for the rank that needs most, because it could not be measured any more:"
    yield from (f"  {name}: {value / 2**20:,.1f} MiB" for name, value in parts.items() if value)


def _told(
    changes: Sequence[Change],
    rungs: Sequence[FallbackLayout],
    forecast: CostModel,
    candidate: Candidate,
    fleet: Cluster | None,
    typed: Callable[[FallbackLayout], str],
) -> Iterator[str]:
    before = forecast.estimate(candidate)
    if not changes:
        yield f"No layout of {plural(forecast.cluster.ranks, 'rank')} within two changes would fit."
        return
    usual = "" if fleet is not None else " (times are for a typical machine: this one was not measured yet)"
    yield f"The cheapest changes, by forecast{usual}:"
    for number, (change, rung) in enumerate(zip(changes, rungs, strict=True), 1):
        less = format_size(round(before.peak_bytes - change.estimate.peak_bytes))
        longer = f"{change.seconds / before.step_seconds:+.0%} time"
        price = f" ({format_duration(abs(change.seconds))} per step)" if fleet is not None else ""
        yield f"  {number}. {change.description}: {less} less, {longer}{price}"
        yield f"     {typed(rung)}"


def _usual(task: Task) -> Cluster:
    return Cluster(device=_USUAL, devices=task.ranks, inside=_LINK, between=_LINK, host=_LINK, name="usual")
