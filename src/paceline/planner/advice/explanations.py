"""Explanations, in one line each, of a layout's place in a plan, and the error if no layout fits."""

from dataclasses import replace

from paceline.console.formatting import format_precise_duration, format_size, plural
from paceline.errors import LayoutError
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.forecast_margins import is_tie, seconds_error
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.least_memory import least_memory
from paceline.planner.search.search_space import FAMILY, SearchSpace

SPENT_ON = {
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
_LEAST = 0.03
_GAIN = 0.98
_TIMES = (2, 4, 8, 16, 32)


def of_recommended(estimate: Estimate) -> str:
    """Return the largest parts of the step's time."""
    return _shares(estimate)


def left_of(estimate: Estimate) -> str:
    """Return how much memory of a device is left."""
    left = format_size(round(max(0.0, estimate.device_bytes - estimate.peak_bytes)))
    return f"{left} of {format_size(round(estimate.device_bytes))} are left"


def of_simple(estimate: Estimate, quickest: Estimate) -> str:
    """Return why it is recommended although another is slightly faster."""
    less, error = estimate.step_seconds / quickest.step_seconds - 1, seconds_error(estimate, quickest)
    what = "forecast" if quickest.timed is None else "timing"
    tie = f"a tie: {quickest.candidate} is {less:.1%} faster, but the {what} may be {error:.0%} off"
    return f"{of_recommended(estimate)}; {tie}: the simpler one is taken"


def of_other(estimate: Estimate, best: Estimate) -> str:
    """Return how much slower than the recommended one it is, and what takes longer."""
    more = {name: estimate.seconds.parts[name] - best.seconds.parts[name] for name in SPENT_ON}
    worst = max(more, key=lambda name: more[name])
    times = estimate.step_seconds / best.step_seconds
    quickest = min(estimate, best, key=lambda one: one.step_seconds)
    tie = " (a tie)" if is_tie(best if quickest is estimate else estimate, quickest) else ""
    if more[worst] <= 0:
        return f"{times:.2f} times as long{tie}"
    return f"{times:.2f} times as long{tie}: {SPENT_ON[worst]} +{format_precise_duration(more[worst])}"


def of_misfit(estimate: Estimate) -> str:
    """Return by how much it does not fit, and its largest parts."""
    parts = estimate.memory.parts
    most = sorted(parts, key=lambda name: -parts[name])[:2]
    said = ", ".join(f"{name} {format_size(round(parts[name]))}" for name in most)
    if estimate.is_tight:
        way = "over" if estimate.over_bytes > 0 else "below"
        near, off = format_size(round(abs(estimate.over_bytes))), format_size(round(estimate.margin_bytes))
        return f"tight: {near} {way} the limit, and the forecast may be {off} off: {said}"
    if estimate.over_bytes > 0:
        more = "; replays use more memory than the forecast" if estimate.limit_bytes < estimate.device_bytes else ""
        return f"{format_size(round(estimate.over_bytes))} too much: {said}{more}"
    return f"the host would hold {format_size(round(estimate.memory.host_bytes))} per rank, more than it has"


def bottlenecks(forecast: CostModel, best: Estimate, grid: SearchSpace) -> tuple[str, ...]:
    """Return what limits the step: the largest part of its time, and memory if a faster layout lacks it."""
    found = [f"limited by {SPENT_ON[_largest(best)]}"]
    device = replace(forecast.fleet.device, memory_bytes=2 * forecast.fleet.device.memory_bytes)
    roomy = CostModel(
        facts=forecast.facts, fleet=replace(forecast.fleet, device=device), efficiency=forecast.efficiency
    )
    freer = search(roomy, grid=grid).first
    reckoned = forecast.seconds(best.candidate).step_seconds
    if freer is not None and not freer.fits_on(best.limit_bytes) and freer.step_seconds < _GAIN * reckoned:
        more = freer.peak_bytes - best.limit_bytes
        gain = reckoned - freer.step_seconds
        much, quicker = format_size(round(more)), format_precise_duration(gain)
        what = f"with {much} more per device, {freer.candidate} would be {quicker} faster"
        found.append(f"and by memory: {what}")
    return tuple(found)


def no_candidate(family: str, forecast: CostModel) -> str:
    """Return why the grid has no candidate of a family; empty if that is obvious."""
    facts, ranks = forecast.facts, forecast.fleet.ranks
    for word in (family, f"{FAMILY}={family}"):
        if word in facts.refused:
            return f"{family}: {facts.refused[word]}"
    if family in ("ddp", "zero1", "zero2", "fsdp", "hsdp") and ranks > facts.global_batch_size:
        return f"{family}: {plural(ranks, 'replica')} for a global batch of {plural(facts.global_batch_size, 'sample')}"
    if family in ("zero3", "fsdp", "hsdp") and facts.optimizer.whole_tensors:
        return f"{family}: {facts.optimizer.name} needs whole tensors"
    sizes = {"tp": facts.tp_sizes, "cp": facts.cp_sizes, "ep": facts.ep_sizes}.get(family, ())
    own = [f"{word}: {why}" for word, why in facts.refused.items() if _is_size(word, family)]
    if own:
        return f"{family}: {'; '.join(own)}"
    if sizes and ranks > 1:
        return (
            f"{family}: none of its sizes {', '.join(map(str, sizes))} leaves a legal layout of {plural(ranks, 'rank')}"
        )
    return ""


def _is_size(word: str, family: str) -> bool:
    """Return True if the word is a size of that axis, like `tp=4`."""
    return word.startswith(f"{family}=") and word.removeprefix(f"{family}=").isdigit()


def nothing_fits(forecast: CostModel, grid: SearchSpace, nearest: Estimate | None) -> LayoutError:
    """Return the error, with the nearest layout and a cluster on which a layout fits."""
    fleet, facts = forecast.fleet, forecast.facts
    name = facts.name or "the model"
    if nearest is None:
        samples = plural(facts.global_batch_size, "sample")
        lost = [f"{word}: {why}" for word, why in facts.refused.items() if fleet.ranks <= facts.global_batch_size]
        return LayoutError(
            f"there is no layout of {name} on {fleet}.",
            cause="; ".join(lost) or f"{plural(fleet.ranks, 'rank')} mean more replicas than the {samples} of a step",
            hint=f"a global batch of {fleet.ranks} or more, or fewer ranks",
        )
    hint = _where_it_fits(forecast, grid, nearest)
    if nearest.is_tight:
        typed = "".join(f" --{setting} {value}" for setting, value in nearest.settings.items())
        hint = f"{hint}; or try it: --layout {nearest.layout}{typed}"
    return LayoutError(
        f"no layout of {name} {'surely ' * nearest.is_tight}fits on {fleet}.",
        cause=f"the nearest is {nearest.candidate}: {of_misfit(nearest)}",
        hint=hint,
    )


def _where_it_fits(forecast: CostModel, grid: SearchSpace, nearest: Estimate) -> str:
    fleet = forecast.fleet
    for times in _TIMES:
        larger = replace(fleet, nodes=fleet.nodes * times)
        if fleet.nodes == 1 and fleet.devices * times <= 8:
            larger = replace(fleet, devices=fleet.devices * times)
        other = CostModel(facts=forecast.facts, fleet=larger, efficiency=forecast.efficiency)
        found = least_memory(other, grid=grid)
        if found is not None and found.fits:
            counts = f"{larger.nodes}x{larger.devices}" if larger.nodes > 1 else str(larger.devices)
            return f"--cluster {counts}x{fleet.device.name}, where {found.layout} fits; or shorter samples"
    return f"devices of {format_size(round(nearest.peak_bytes))}, shorter samples, or a smaller model"


def _largest(estimate: Estimate) -> str:
    parts = estimate.seconds.parts
    return max(SPENT_ON, key=lambda name: parts[name])


def _shares(estimate: Estimate) -> str:
    parts = estimate.seconds.parts
    most = sorted(SPENT_ON, key=lambda name: -parts[name])
    said = [name for name in most if parts[name] >= _LEAST * estimate.step_seconds][:4]
    return ", ".join(f"{SPENT_ON[name]} {parts[name] / estimate.step_seconds:.0%}" for name in said)
