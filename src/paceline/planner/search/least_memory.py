"""Find the candidate of a family that needs the least memory, to show by how much the family does not fit."""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.search.bounds import Bounds
from paceline.planner.search.search_space import (
    SearchSpace,
    data_parallel_choices,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)

_DATA_PARALLEL_FAMILIES = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp")


def find_least_memory(cost_model: CostModel, *, grid: SearchSpace, family: str = "") -> Estimate | None:
    """Return the estimate of the candidate that needs least memory, by branch and bound.

    With a `family`, consider only its candidates. Return None if the search space has no such candidate.
    """
    bounds = Bounds(cost_model=cost_model, grid=grid)
    tie_breaker = count()
    # bytes, level (0 recompute node, 1 schedule node, 2 leaf), tie breaker, node
    heap: list[tuple[float, int, int, Candidate]] = []
    for root in _recompute_nodes(cost_model, grid, family):
        heappush(heap, (bounds.recompute_node_bytes(root), 0, next(tie_breaker), root))
    while heap:
        _, level, _, node = heappop(heap)
        if level == 2:
            return cost_model.estimate(node)
        for child in _expand_node(node, level, cost_model, grid):
            if level == 0:
                heappush(heap, (bounds.schedule_node_bytes(child), 1, next(tie_breaker), child))
            elif not family or child.family == family:
                heappush(heap, (_needed_bytes(cost_model, child), 2, next(tie_breaker), child))
    return None


def _needed_bytes(cost_model: CostModel, candidate: Candidate) -> float:
    """Return the peak bytes on the device, plus the offloaded bytes that exceed the rank's share of the host."""
    memory, host = cost_model.memory(candidate), cost_model.host_limit_bytes
    return memory.peak_bytes + (0.0 if host is None else max(0.0, memory.host_bytes - host))


def _recompute_nodes(cost_model: CostModel, grid: SearchSpace, family: str) -> Iterator[Candidate]:
    """Yield the recompute nodes that may have leaves of the family."""
    for node in model_parallel_choices(cost_model.profile, cost_model.cluster, grid):
        if (
            not family
            or node.family == family
            or (node.family in _DATA_PARALLEL_FAMILIES and family in _DATA_PARALLEL_FAMILIES)
        ):
            yield from recompute_choices(node, cost_model.profile, grid)


def _expand_node(node: Candidate, level: int, cost_model: CostModel, grid: SearchSpace) -> Iterator[Candidate]:
    """Yield the schedule nodes of a recompute node (level 0), or the leaves of a schedule node (level 1)."""
    profile = cost_model.profile
    if level == 0:
        for child in microbatch_choices(node, profile, grid):
            yield from schedule_choices(child, profile, grid)
    else:
        yield from data_parallel_choices(node, profile, cost_model.cluster, grid)
