"""Explain each layout of a plan in one line, and build the error for the case that no layout fits."""

from dataclasses import replace

from paceline.console.formatting import format_precise_duration, format_size, plural
from paceline.errors import LayoutError
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import is_tie, seconds_error
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.least_memory import find_least_memory
from paceline.planner.search.search_space import FAMILY, SearchSpace

_MIN_SHARE = 0.03  # of the step; shorter parts are not shown
_FASTER_RATIO = 0.98  # a layout is worth mentioning if it takes less than this fraction of the recommended step time
_CLUSTER_FACTORS = (2, 4, 8, 16, 32)  # how many times larger the suggested clusters are

TIME_PART_LABELS = {
    "compute": "compute",
    "again": "recomputing activations",
    "tensor": "tp communication",
    "context": "cp communication",
    "experts": "ep communication",
    "gather": "gathering shards",
    "bubble": "the pipeline (idle time, and messages between stages)",
    "gradients": "reducing gradients",
    "update": "the update",
    "offload": "transfers to the host",
    "start": "starting a step",
}
"""The text for each field of `StepTime`."""


def explain_recommended(estimate: Estimate) -> str:
    """Return at most four parts of the step's time, the largest first, as percentages."""
    parts = estimate.seconds.parts
    ordered = sorted(TIME_PART_LABELS, key=lambda name: -parts[name])
    shown = [name for name in ordered if parts[name] >= _MIN_SHARE * estimate.step_seconds][:4]
    return ", ".join(f"{TIME_PART_LABELS[name]} {parts[name] / estimate.step_seconds:.0%}" for name in shown)


def free_memory_text(estimate: Estimate) -> str:
    """Return the text on how much memory of a device is free."""
    free = format_size(round(max(0.0, estimate.device_bytes - estimate.peak_bytes)))
    return f"{free} of {format_size(round(estimate.device_bytes))} are left"


def explain_simpler(estimate: Estimate, fastest: Estimate) -> str:
    """Return why the layout of `estimate` is recommended although `fastest` is slightly faster."""
    gain, error = estimate.step_seconds / fastest.step_seconds - 1, seconds_error(estimate, fastest)
    source = "forecast" if fastest.measured_time is None else "timing"
    tie = f"a tie: {fastest.candidate} is {gain:.1%} faster, but the {source} may be {error:.0%} off"
    return f"{explain_recommended(estimate)}; {tie}: the simpler one is recommended"


def explain_slower(estimate: Estimate, best: Estimate) -> str:
    """Return how much slower a layout is than the recommended one (`best`), and which part of the step grows most."""
    differences = {name: estimate.seconds.parts[name] - best.seconds.parts[name] for name in TIME_PART_LABELS}
    worst = max(differences, key=lambda name: differences[name])
    ratio = estimate.step_seconds / best.step_seconds
    fastest = min(estimate, best, key=lambda e: e.step_seconds)
    tie = " (a tie)" if is_tie(best if fastest is estimate else estimate, fastest) else ""
    if differences[worst] <= 0:
        return f"{ratio:.2f} times as long{tie}"
    return f"{ratio:.2f} times as long{tie}: {TIME_PART_LABELS[worst]} +{format_precise_duration(differences[worst])}"


def explain_misfit(estimate: Estimate) -> str:
    """Return by how much the layout exceeds the device's memory, or that it exceeds the host's memory."""
    parts = estimate.memory.parts
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    parts_text = ", ".join(f"{name} {format_size(round(parts[name]))}" for name in largest)
    if estimate.is_tight:
        side = "over" if estimate.over_bytes > 0 else "below"
        distance, margin = format_size(round(abs(estimate.over_bytes))), format_size(round(estimate.margin_bytes))
        return f"tight: {distance} {side} the limit, and the forecast may be {margin} off: {parts_text}"
    if estimate.over_bytes > 0:
        replay_note = (
            "; replays use more memory than the forecast" if estimate.limit_bytes < estimate.device_bytes else ""
        )
        return f"{format_size(round(estimate.over_bytes))} too much: {parts_text}{replay_note}"
    host_bytes = format_size(round(estimate.memory.host_bytes))
    return f"each rank would offload {host_bytes}, more than its share of the host's memory"


def find_bottlenecks(cost_model: CostModel, best: Estimate, grid: SearchSpace) -> tuple[str, ...]:
    """Return lines on what limits the step time.

    They name the largest part of the time and, if a faster layout would fit into twice the memory, also the memory.
    """
    lines = [f"limited by {TIME_PART_LABELS[_largest_time_part(best)]}"]
    cluster, profile, efficiency = cost_model.cluster, cost_model.profile, cost_model.efficiency
    larger_device = replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes)
    larger_cluster = replace(cluster, device=larger_device)
    faster = search(CostModel(profile=profile, cluster=larger_cluster, efficiency=efficiency), grid=grid).fastest
    forecast_seconds = cost_model.seconds(best.candidate).step_seconds
    if (
        faster is not None
        and not faster.fits_on(best.limit_bytes)
        and faster.step_seconds < _FASTER_RATIO * forecast_seconds
    ):
        extra_bytes = faster.peak_bytes - best.limit_bytes
        gain = forecast_seconds - faster.step_seconds
        extra_text, gain_text = format_size(round(extra_bytes)), format_precise_duration(gain)
        suggestion = f"with {extra_text} more per device, {faster.candidate} would be {gain_text} faster"
        lines.append(f"and by memory: {suggestion}")
    return tuple(lines)


def explain_missing_family(family: str, cost_model: CostModel) -> str:
    """Return why the search space has no candidate of a family; empty if no reason is known."""
    profile, ranks = cost_model.profile, cost_model.cluster.ranks
    for key in (family, f"{FAMILY}={family}"):
        if key in profile.refused:
            return f"{family}: {profile.refused[key]}"
    if family in ("ddp", "zero1", "zero2", "fsdp", "hsdp") and ranks > profile.global_batch_size:
        return (
            f"{family}: {plural(ranks, 'replica')} for a global batch of {plural(profile.global_batch_size, 'sample')}"
        )
    if family in ("fsdp", "hsdp") and profile.optimizer.whole_tensors:
        return f"{family}: {profile.optimizer.name} needs whole tensors"
    sizes = {"tp": profile.tp_sizes, "cp": profile.cp_sizes, "ep": profile.ep_sizes}.get(family, ())
    size_reasons = [f"{key}: {why}" for key, why in profile.refused.items() if _is_size(key, family)]
    if size_reasons:
        return f"{family}: {'; '.join(size_reasons)}"
    if sizes and ranks > 1:
        return (
            f"{family}: none of its sizes {', '.join(map(str, sizes))} leaves a legal layout of {plural(ranks, 'rank')}"
        )
    return ""


def _is_size(key: str, family: str) -> bool:
    """Return True if the key names a size of the axis `family`, like `tp=4`."""
    return key.startswith(f"{family}=") and key.removeprefix(f"{family}=").isdigit()


def no_layout_fits_error(cost_model: CostModel, grid: SearchSpace, nearest: Estimate | None) -> LayoutError:
    """Return the error that no layout fits. It names the layout that needs least memory, and a cluster where one fits.

    `nearest` is the layout that needs least memory, or None if the search space is empty.
    """
    cluster, profile = cost_model.cluster, cost_model.profile
    name = profile.name or "the model"
    if nearest is None:
        samples = plural(profile.global_batch_size, "sample")
        reasons = [
            f"{key}: {why}" for key, why in profile.refused.items() if cluster.ranks <= profile.global_batch_size
        ]
        return LayoutError(
            f"there is no layout of {name} on {cluster}.",
            cause="; ".join(reasons)
            or f"{plural(cluster.ranks, 'rank')} mean more replicas than the {samples} of a step",
            hint=f"a global batch of {cluster.ranks} or more, or fewer ranks",
        )
    hint = _larger_cluster_hint(cost_model, grid, nearest)
    if nearest.is_tight:
        options = "".join(f" --{setting} {value}" for setting, value in nearest.settings.items())
        hint = f"{hint}; or try it: --layout {nearest.layout}{options}"
    return LayoutError(
        f"no layout of {name} {'is certain to fit' if nearest.is_tight else 'fits'} on {cluster}.",
        cause=f"the nearest is {nearest.candidate}: {explain_misfit(nearest)}",
        hint=hint,
    )


def _larger_cluster_hint(cost_model: CostModel, grid: SearchSpace, nearest: Estimate) -> str:
    """Return the options of the smallest larger cluster on which a layout fits, or other advice if there is none."""
    cluster = cost_model.cluster
    for factor in _CLUSTER_FACTORS:
        larger = replace(cluster, nodes=cluster.nodes * factor)
        if cluster.nodes == 1 and cluster.devices * factor <= 8:
            larger = replace(cluster, devices=cluster.devices * factor)
        larger_cost_model = CostModel(profile=cost_model.profile, cluster=larger, efficiency=cost_model.efficiency)
        estimate = find_least_memory(larger_cost_model, grid=grid)
        if estimate is not None and estimate.fits:
            counts = f"{larger.nodes}x{larger.devices}" if larger.nodes > 1 else str(larger.devices)
            return f"--cluster {counts}x{cluster.device.name}, where {estimate.layout} fits; or shorter samples"
    return f"devices of {format_size(round(nearest.peak_bytes))}, shorter samples, or a smaller model"


def _largest_time_part(estimate: Estimate) -> str:
    parts = estimate.seconds.parts
    return max(TIME_PART_LABELS, key=lambda name: parts[name])
