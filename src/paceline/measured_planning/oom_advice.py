"""Advice after out-of-memory: layouts that need less memory, with their additional time and the command to type."""

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
from paceline.measured_planning.auto_layout import CHOICE_FILE, make_planning_task
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate, candidate_from_layout
from paceline.planner.hardware.cluster import Cluster, Device, Link
from paceline.planner.layout.host_resources import usable_cores
from paceline.planner.layout.mesh import resolve_mesh
from paceline.planner.model_costs.model_profile import ModelProfile, model_profile_from_json
from paceline.planner.search.fallbacks import build_forecast
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.planner.search.neighbors import Change, cheapest_changes
from paceline.planner.search.search_space import SearchSpace
from paceline.profiling.machine_benchmarks.this_machine import cached_local_cluster
from paceline.run_folder.run_folder import RunFolder

PROFILE_ENTRY = "paceline.measured_planning.auto_worker:write_model_profile"
_USABLE_SHARE = 0.9  # of the available memory, which the forecast of a suggested layout may use
_LIBRARIES_BYTES = 64 << 20  # of stacks of threads and buffers of libraries, which no layout reduces
_TYPICAL_DEVICE = Device(  # one core: the advice uses only ratios of its times, and says that they are typical
    name="a typical processor", kind="cpu", memory_bytes=1e15, flops_per_second={"fp32": 5e10}, bytes_per_second=5e9
)
_TYPICAL_LINK = Link(name="memory", latency_seconds=1e-4, bytes_per_second=2e9)


@dataclass(frozen=True, kw_only=True)
class OomAdvice:
    """Lines about the three fastest changes with which the run would fit, and the layout of the fastest one."""

    lines: tuple[str, ...] = ()
    first_layout: LayoutForecast | None = None


def advise_after_oom(
    task: Task,
    failure: Failure,
    *,
    profile_model: Callable[[Task], Mapping[str, Any]],
    command_for: Callable[[LayoutForecast], str],
) -> OomAdvice:
    """Return advice for a run that ran out of memory. It is empty if the run's model can't be profiled.

    `profile_model` returns the model's profile under the key `facts`. `command_for` returns the command to type for a
    layout.
    """
    if not parse_update(task.update).has_cost_model:
        return OomAdvice()
    try:
        profile = model_profile_from_json(profile_model(task)["facts"])
        candidate = _candidate(task, profile)
        cluster = cached_local_cluster(ranks=task.ranks, device=task.device)
        forecast = CostModel(profile=profile, cluster=cluster or _typical_cluster(task))
        if (oversized_line := _oversized_allocation_line(forecast, candidate, failure)) is not None:
            return OomAdvice(lines=(oversized_line,))
        forecast = _limit_to_available_memory(forecast, candidate, failure)
        changes = cheapest_changes(forecast, forecast.estimate(candidate), grid=SearchSpace())
    except (PacelineError, OSError, ValueError, KeyError, TypeError):
        return OomAdvice()
    layouts = [build_forecast(change.estimate) for change in changes]
    lines = [
        *_breakdown_lines(forecast, candidate, failure),
        *_advice_lines(changes, layouts, forecast, candidate, cluster, command_for),
    ]
    return OomAdvice(lines=tuple(lines), first_layout=layouts[0] if layouts else None)


def model_profile_of_run(task: Task) -> Mapping[str, Any]:
    """Return the model's profile under the key `facts`: from the run's automatic plan, else from a new process."""
    folder = RunFolder(Path(task.run) / "auto")
    with suppress(OSError, ValueError):
        return dict(read_json(folder.path / CHOICE_FILE))
    folder.path.mkdir(parents=True, exist_ok=True)
    print_line("out of memory: searching for layouts that need less", sys.stderr)
    profile_task = replace(make_planning_task(task), run=str(folder.path), options={"most_ranks": task.ranks})
    start(
        LaunchRequest(
            ranks=1,
            run=folder,
            entry=PROFILE_ENTRY,
            payload=profile_task.as_json(),
            threads=usable_cores(),
            saves_checkpoints=False,
        )
    )
    return dict(read_json(folder.path / CHOICE_FILE))


def _candidate(task: Task, profile: ModelProfile) -> Candidate:
    """Return the candidate of the layout that ran out of memory."""
    layout = parse_layout(task.layout)
    mesh = resolve_mesh(layout, ranks=task.ranks, problems=[])
    requested = task.settings.get("train.micro_batch_size")
    with suppress(OSError, ValueError, KeyError):
        requested = read_json(Path(task.run) / "plan.json")["micro_batch_size"]
    samples_per_replica = -(-profile.global_batch_size // mesh.replicas)
    micro_batch_size = int(requested or samples_per_replica)
    return candidate_from_layout(
        layout, mesh, micro_batch_size=micro_batch_size, precision=profile.precision, compiles=profile.compiles
    )


def _oversized_allocation_line(forecast: CostModel, candidate: Candidate, failure: Failure) -> str | None:
    """Return a line if the failed allocation alone is larger than the forecast of a rank's memory, else None.

    Such an allocation does not depend on the layout.
    """
    forecast_bytes = forecast.estimate(candidate).peak_bytes
    if failure.requested_bytes <= forecast_bytes:
        return None
    allocation = format_size(failure.requested_bytes)
    return (
        f"No other layout is suggested, because this allocation alone ({allocation}) is larger than the forecast of a "
        f"rank's total memory ({format_size(round(forecast_bytes))})."
    )


def _limit_to_available_memory(forecast: CostModel, candidate: Candidate, failure: Failure) -> CostModel:
    """Return the cost model with a memory limit that is below the forecast for the layout that failed.

    The limit is a share of this forecast. If less memory than this forecast was available to the failed rank, the limit
    is a share of the available memory. If the rank used more memory than forecast, the available memory is first
    divided by the ratio of used to forecast memory.
    """
    reserve = forecast.cluster.device.reserve_bytes
    forecast_bytes = forecast.estimate(candidate).peak_bytes - reserve
    held_bytes: Mapping[str, int] = failure.said.get("held") or {}
    limit, other_bytes = (
        failure.said.get("limit_bytes"),
        sum(held_bytes.get(name, 0) for name in ("rest", "other processes")),
    )
    available = forecast_bytes
    if limit is not None and "rest" in held_bytes:
        measured = sum(held_bytes.values()) - other_bytes
        library_bytes = 0 if forecast.cluster.device.is_accelerator else _LIBRARIES_BYTES
        available = min(
            available,
            max(0.0, limit - other_bytes - library_bytes) / max(1.0, (measured - library_bytes) / forecast_bytes),
        )
    return forecast.with_memory_limit(reserve + _USABLE_SHARE * available)


def _breakdown_lines(forecast: CostModel, candidate: Candidate, failure: Failure) -> Iterator[str]:
    """Yield the forecast memory breakdown if the failed process could not report the measured one."""
    if "parameters" in (failure.said.get("held") or {}):
        return
    parts = forecast.estimate(candidate).memory.parts
    yield "forecast for the rank that needs the most memory (the failed rank could not be measured any more):"
    yield from (f"  {name}: {value / 2**20:,.1f} MiB" for name, value in parts.items() if value)


def _advice_lines(
    changes: Sequence[Change],
    layouts: Sequence[LayoutForecast],
    forecast: CostModel,
    candidate: Candidate,
    cluster: Cluster | None,
    command_for: Callable[[LayoutForecast], str],
) -> Iterator[str]:
    current = forecast.estimate(candidate)
    if not changes:
        yield f"No layout of {plural(forecast.cluster.ranks, 'rank')} with at most two changes would fit."
        return
    note = "" if cluster is not None else " (times are for a typical machine: this one was not measured yet)"
    yield f"The cheapest changes, by forecast{note}:"
    for number, (change, layout) in enumerate(zip(changes, layouts, strict=True), 1):
        saved = format_size(round(current.peak_bytes - change.estimate.peak_bytes))
        slowdown = f"{change.seconds / current.step_seconds:+.0%} time"
        added_seconds = f" ({format_duration(abs(change.seconds))} per step)" if cluster is not None else ""
        yield f"  {number}. {change.description}: {saved} less, {slowdown}{added_seconds}"
        yield f"     {command_for(layout)}"


def _typical_cluster(task: Task) -> Cluster:
    return Cluster(
        device=_TYPICAL_DEVICE,
        devices=task.ranks,
        inside=_TYPICAL_LINK,
        between=_TYPICAL_LINK,
        host=_TYPICAL_LINK,
        name="usual",
    )
