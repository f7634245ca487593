"""Search for the fastest layouts by branch and bound (Land and Doig, 1960): exact for the cost model.

Nodes are visited in the order of their lower bounds; a node that cannot beat the best of its family is dropped. See
`bounds` for why this misses nothing.
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

_ROUNDING = 1 - 1e-9
_LEAF = 3
Key = tuple[float, float, str, int]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best fitting candidate of each family. `num_estimates` were fully estimated, of `num_nodes` nodes."""

    best: Mapping[str, Estimate]
    num_estimates: int
    num_nodes: int

    @property
    def first(self) -> Estimate | None:
        """The fastest of all, None if nothing fits."""
        return min(self.best.values(), key=key_of, default=None)


def key_of(estimate: Estimate) -> Key:
    """Return the sort key of an estimate: faster first, then smaller, then by layout name."""
    return (estimate.step_seconds, estimate.peak_bytes, estimate.layout, estimate.candidate.micro_batch_size)


def search(forecast: CostModel, *, grid: SearchSpace | None = None) -> SearchResult:
    """Return the fastest candidate of each family that fits."""
    grid = grid or SearchSpace()
    walk = _Walk(forecast=forecast, grid=grid, bounds=Bounds(forecast=forecast, grid=grid))
    walk.run()
    return SearchResult(best=walk.best, num_estimates=walk.num_estimates, num_nodes=walk.num_nodes)


def try_all(forecast: CostModel, *, grid: SearchSpace | None = None) -> SearchResult:
    """Estimate every candidate and return the best: the naive version of `search`."""
    best: dict[str, Estimate] = {}
    number = 0
    for candidate in candidates(forecast.facts, forecast.fleet, grid or SearchSpace()):
        number += 1
        found = forecast.estimate(candidate)
        other = best.get(candidate.family)
        if found.fits and (other is None or key_of(found) < key_of(other)):
            best[candidate.family] = found
    return SearchResult(best=best, num_estimates=number, num_nodes=number)


@dataclass(kw_only=True)
class _Walk:
    forecast: CostModel
    grid: SearchSpace
    bounds: Bounds
    best: dict[str, Estimate] = field(default_factory=dict)
    num_estimates: int = 0
    num_nodes: int = 0
    _beaten: dict[str, tuple[float, float]] = field(default_factory=dict)
    _heap: list[tuple[float, int, int, Candidate]] = field(default_factory=list)
    _turn: Iterator[int] = field(default_factory=count)

    def run(self) -> None:
        """Visit nodes until none is left that could beat the best of its family."""
        forecast, grid = self.forecast, self.grid
        grow = (self._grow_bough, self._grow_branch, self._grow_twig)
        for trunk in model_parallel_choices(forecast.facts, forecast.fleet, grid):
            for bough in recompute_choices(trunk, forecast.facts, grid):
                self._push(self.bounds.bough_seconds(bough), 0, bough)
        while self._heap:
            bound, level, _, node = heappop(self._heap)
            if self._is_beaten(bound, node, level):
                continue
            if level < len(grow):
                grow[level](bound, node)
            else:
                self._look(node)

    def _grow_bough(self, bound: float, bough: Candidate) -> None:
        if self.bounds.bough_bytes(bough) * _ROUNDING > self.forecast.fleet.device.memory_bytes:
            return
        for branch in microbatch_choices(bough, self.forecast.facts, self.grid):
            self._push(max(bound, self.bounds.branch_seconds(branch)), 1, branch)

    def _grow_branch(self, bound: float, branch: Candidate) -> None:
        for twig in schedule_choices(branch, self.forecast.facts, self.grid):
            self._push(max(bound, self.bounds.twig_seconds(twig)), 2, twig)

    def _grow_twig(self, bound: float, twig: Candidate) -> None:
        if not self.bounds.may_fit(twig, self.forecast.fleet.device.memory_bytes / _ROUNDING):
            return
        for leaf in data_parallel_choices(twig, self.forecast.facts, self.forecast.fleet, self.grid):
            self._push(self.bounds.leaf_seconds(leaf, twig_seconds=bound), _LEAF, leaf)

    def _look(self, leaf: Candidate) -> None:
        self.num_estimates += 1
        if self.forecast.memory(leaf).peak_bytes > self.forecast.fleet.device.memory_bytes:
            return
        found = self.forecast.estimate(leaf)
        other = self.best.get(leaf.family)
        if found.fits and (other is None or key_of(found) < key_of(other)):
            self.best[leaf.family] = found
            self._beaten[leaf.family] = found.step_seconds, _ROUNDING * self.forecast.longer(leaf.family)

    def _push(self, bound: float, level: int, node: Candidate) -> None:
        self.num_nodes += 1
        if not self._is_beaten(bound, node, level):
            heappush(self._heap, (bound, level, next(self._turn), node))

    def _is_beaten(self, bound: float, node: Candidate, level: int) -> bool:
        """Return True if every family below the node has a better candidate already."""
        if level < _LEAF and node.pp * node.tp * node.cp * node.ep == 1 and node.replicas > 1:
            families: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
        else:
            families = (node.family,)
        for family in families:
            seconds, longer = self._beaten.get(family, (float("inf"), 1.0))
            if bound * longer <= seconds:
                return False
        return True
