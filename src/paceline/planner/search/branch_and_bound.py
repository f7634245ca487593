"""Find the fastest layouts by branch and bound (Land and Doig, 1960): exact for the cost model.

The search visits nodes in the order of their lower bounds and drops a node that cannot beat the best candidate of its
family. `bounds.py` explains why no better candidate is missed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.search.bounds import Bounds
from paceline.planner.search.search_space import (
    SearchSpace,
    candidates,
    data_parallel_choices,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)

_ROUNDING = 1 - 1e-9  # bounds are reduced by this factor, so that rounding errors never prune the best candidate
_LEAF = 3  # the level of a node: 0 recompute, 1 microbatch, 2 schedule, 3 leaf
SortKey = tuple[float, float, str, int]  # step seconds, peak bytes, layout, microbatch size


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search."""

    best: Mapping[str, Estimate]
    """The fastest candidate that fits, by family."""
    num_estimates: int
    """The number of leaves that were estimated."""
    num_nodes: int
    """The number of nodes, leaves included, whose lower bound was computed; without bounds, the number of leaves."""

    @property
    def fastest(self) -> Estimate | None:
        """The fastest candidate of all families; None if nothing fits."""
        return min(self.best.values(), key=sort_key, default=None)


def sort_key(estimate: Estimate) -> SortKey:
    """Return the sort key of an estimate: faster first, then smaller, then by layout name."""
    return (estimate.step_seconds, estimate.peak_bytes, estimate.layout, estimate.candidate.micro_batch_size)


def search(cost_model: CostModel, *, grid: SearchSpace | None = None) -> SearchResult:
    """Return the fastest candidate of each family that fits, by branch and bound."""
    grid = grid or SearchSpace()
    state = _BranchAndBound(cost_model=cost_model, grid=grid, bounds=Bounds(cost_model=cost_model, grid=grid))
    state.run()
    return SearchResult(best=state.best, num_estimates=state.num_estimates, num_nodes=state.num_nodes)


def search_exhaustively(cost_model: CostModel, *, grid: SearchSpace | None = None) -> SearchResult:
    """Return the result of `search` by the naive method, which estimates every candidate."""
    best: dict[str, Estimate] = {}
    num_estimates = 0
    for candidate in candidates(cost_model.profile, cost_model.cluster, grid or SearchSpace()):
        num_estimates += 1
        estimate = cost_model.estimate(candidate)
        incumbent = best.get(candidate.family)
        if estimate.fits and (incumbent is None or sort_key(estimate) < sort_key(incumbent)):
            best[candidate.family] = estimate
    return SearchResult(best=best, num_estimates=num_estimates, num_nodes=num_estimates)


@dataclass(kw_only=True)
class _BranchAndBound:
    """The state of a search."""

    cost_model: CostModel
    grid: SearchSpace
    bounds: Bounds
    best: dict[str, Estimate] = field(default_factory=dict)
    """The best candidate found so far, by family."""
    num_estimates: int = 0
    num_nodes: int = 0
    _best_seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For each family, the seconds of its best candidate and a factor.

    A bound is multiplied by the factor before it is compared with the seconds, because it omits `CostModel.time_ratio`.
    """
    _heap: list[tuple[float, int, int, Candidate]] = field(default_factory=list)
    """The nodes to visit, as (bound, level, tie breaker, node)."""
    _tie_breaker: Iterator[int] = field(default_factory=count)

    def run(self) -> None:
        """Visit nodes until no remaining node can beat the best candidate of its family."""
        cost_model, grid = self.cost_model, self.grid
        expand = (self._expand_recompute_node, self._expand_microbatch_node, self._expand_schedule_node)
        for model_parallel_node in model_parallel_choices(cost_model.profile, cost_model.cluster, grid):
            for recompute_node in recompute_choices(model_parallel_node, cost_model.profile, grid):
                self._push(self.bounds.recompute_node_seconds(recompute_node), 0, recompute_node)
        while self._heap:
            bound, level, _, node = heappop(self._heap)
            if self._is_dominated(bound, node, level):
                continue
            if level < len(expand):
                expand[level](bound, node)
            else:
                self._evaluate_leaf(node)

    def _expand_recompute_node(self, bound: float, node: Candidate) -> None:
        if self.bounds.recompute_node_bytes(node) * _ROUNDING > self.cost_model.cluster.device.memory_bytes:
            return
        for child in microbatch_choices(node, self.cost_model.profile, self.grid):
            self._push(max(bound, self.bounds.microbatch_node_seconds(child)), 1, child)

    def _expand_microbatch_node(self, bound: float, node: Candidate) -> None:
        for child in schedule_choices(node, self.cost_model.profile, self.grid):
            self._push(max(bound, self.bounds.schedule_node_seconds(child)), 2, child)

    def _expand_schedule_node(self, bound: float, node: Candidate) -> None:
        if not self.bounds.may_fit(node, self.cost_model.cluster.device.memory_bytes / _ROUNDING):
            return
        for leaf in data_parallel_choices(node, self.cost_model.profile, self.cost_model.cluster, self.grid):
            self._push(self.bounds.leaf_seconds(leaf, node_seconds=bound), _LEAF, leaf)

    def _evaluate_leaf(self, leaf: Candidate) -> None:
        """Estimate a leaf; if it fits and is better than the best candidate of its family, replace that one."""
        self.num_estimates += 1
        if self.cost_model.memory(leaf).peak_bytes > self.cost_model.cluster.device.memory_bytes:
            return
        estimate = self.cost_model.estimate(leaf)
        incumbent = self.best.get(leaf.family)
        if estimate.fits and (incumbent is None or sort_key(estimate) < sort_key(incumbent)):
            self.best[leaf.family] = estimate
            self._best_seconds[leaf.family] = estimate.step_seconds, _ROUNDING * self.cost_model.time_ratio(leaf.family)

    def _push(self, bound: float, level: int, node: Candidate) -> None:
        self.num_nodes += 1
        if not self._is_dominated(bound, node, level):
            heappush(self._heap, (bound, level, next(self._tie_breaker), node))

    def _is_dominated(self, bound: float, node: Candidate, level: int) -> bool:
        """Return True if every family that occurs below the node already has a candidate faster than the bound."""
        if level < _LEAF and node.pp * node.tp * node.cp * node.ep == 1 and node.replicas > 1:
            families: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
        else:
            families = (node.family,)
        for family in families:
            seconds, time_ratio = self._best_seconds.get(family, (float("inf"), 1.0))
            if bound * time_ratio <= seconds:
                return False
        return True
