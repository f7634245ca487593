"""Find changes of one or two options that make a candidate fit into memory, each with its cost in time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from typing_extensions import override

from paceline.console.formatting import format_change, format_precise_duration, format_size
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.search.search_space import SearchSpace, is_in_search_space, micro_batch_sizes

_AXES = ("pp", "tp", "cp")  # the axes that a change may double
_MAX_CHANGES = 3  # the largest number of results of `cheapest_changes`
_MAX_DEPTH = 2  # the largest number of changes that are combined in one result


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a candidate."""

    description: str
    """The changed option, or two of them, as in `remat=full`."""
    estimate: Estimate
    """The estimate of the changed candidate."""
    seconds: float
    """The seconds that the change adds to the step; negative if the step becomes shorter."""

    @override
    def __str__(self) -> str:
        """Return e.g. `remat=full: 61.2 GiB, +2.1 s per step (+14%)`."""
        before = self.estimate.step_seconds - self.seconds
        sign = "+" if self.seconds >= 0 else "-"
        peak = format_size(round(self.estimate.peak_bytes))
        seconds, relative_change = format_precise_duration(abs(self.seconds)), format_change(self.seconds / before)
        return f"{self.description}: {peak}, {sign}{seconds} per step ({relative_change})"


def cheapest_changes(cost_model: CostModel, estimate: Estimate, *, grid: SearchSpace) -> tuple[Change, ...]:
    """Return at most three changes after which the candidate fits into memory, the one with the fastest step first.

    Each result is a single change or, if no single change is enough, a combination of two. The result is empty if two
    changes are not enough.
    """
    visited = {estimate.candidate}
    frontier: list[tuple[str, Candidate]] = [("", estimate.candidate)]
    for _ in range(_MAX_DEPTH):
        frontier = [
            (f"{previous}, {change}" if previous else change, neighbor)
            for previous, candidate in frontier
            for change, neighbor in neighbors(candidate, cost_model, grid)
            if neighbor not in visited and not visited.add(neighbor)  # type: ignore[func-returns-value]
        ]
        changed = [(description, cost_model.estimate(candidate)) for description, candidate in frontier]
        fitting = sorted((pair for pair in changed if pair[1].fits), key=lambda pair: pair[1].step_seconds)
        if fitting:
            return tuple(
                Change(description=description, estimate=new, seconds=new.step_seconds - estimate.step_seconds)
                for description, new in fitting[:_MAX_CHANGES]
            )
    return ()


def neighbors(candidate: Candidate, cost_model: CostModel, grid: SearchSpace) -> Iterator[tuple[str, Candidate]]:
    """Yield a description and the new candidate for each single change that may save memory.

    The new candidates are in the search space. The number of ranks and the training stay the same.
    """
    for description, neighbor in _candidate_changes(candidate, cost_model, grid):
        if is_in_search_space(neighbor, cost_model.profile, cost_model.cluster, grid):
            yield description, neighbor


def _candidate_changes(
    candidate: Candidate, cost_model: CostModel, grid: SearchSpace
) -> Iterator[tuple[str, Candidate]]:
    """Yield the results of `neighbors`, and also candidates that are not in the search space."""
    c = candidate
    for remat in grid.remat[grid.remat.index(c.remat) + 1 :] if c.remat in grid.remat else ():
        yield f"remat={remat}", replace(c, remat=remat)
    sizes = micro_batch_sizes(cost_model.profile.global_batch_size, c.replicas, grid)
    for size in sorted((n for n in sizes if n < c.micro_batch_size), reverse=True):
        yield f"micro_batch_size {c.micro_batch_size} -> {size}", replace(c, micro_batch_size=size)
    if not c.sequence and c.tp > 1:
        yield "sequence=true", replace(c, sequence=True)
    if c.schedule != "1f1b":
        yield "schedule=1f1b", replace(c, schedule="1f1b", virtual=1)
    yield from _with_more_sharding(c, grid)
    for axis in _AXES:
        yield from _with_larger_axis(c, axis)


def _with_more_sharding(c: Candidate, grid: SearchSpace) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates that shard more of the state among the replicas, or offload more to the host."""
    for zero in grid.zero:
        if c.replicas > 1 and (zero > c.zero or c.dp_replicate > 1):
            sharded = replace(c, dp_replicate=1, dp_shard=c.replicas, zero=zero)
            yield f"dp_shard={c.replicas}{'' if zero == 3 else f',zero={zero}'}", sharded
    for offload in grid.offload:
        if len(offload) > len(c.offload):
            yield f"offload={'+'.join(offload)}", replace(c, offload=offload)


def _with_larger_axis(c: Candidate, axis: str) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates with twice as many ranks on a model axis and half as many replicas."""
    doubled = 2 * int(getattr(c, axis))
    for data_axis in ("dp_replicate", "dp_shard"):
        size = int(getattr(c, data_axis))
        if size % 2 == 0:
            zero = 0 if data_axis == "dp_shard" and size == 2 else c.zero
            sizes = {axis: doubled, data_axis: size // 2, "zero": zero}
            yield f"{axis}={doubled} ({data_axis}={size // 2})", _replace_sizes(c, sizes)


def _replace_sizes(c: Candidate, sizes: dict[str, int]) -> Candidate:
    """Return the candidate with other axis sizes; without ZeRO, nothing is offloaded and parameters are float32."""
    values = {name: getattr(c, name) for name in c.__dataclass_fields__} | sizes
    if not values["zero"]:
        values |= {"offload": (), "params": "fp32"}
    return Candidate(**values)
