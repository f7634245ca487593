"""Search for the candidate of a family that needs the least memory: how close a misfit comes to fitting."""

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

_DATA = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp")


def least_memory(forecast: CostModel, *, grid: SearchSpace, family: str = "") -> Estimate | None:
    """Return the candidate that needs least memory, by branch and bound over bytes.

    It is of one `family`, or of any if that is empty; None if the grid has no such candidate.
    """
    bounds = Bounds(forecast=forecast, grid=grid)
    turn = count()
    heap: list[tuple[float, int, int, Candidate]] = []
    for bough in _boughs(forecast, grid, family):
        heappush(heap, (bounds.bough_bytes(bough), 0, next(turn), bough))
    while heap:
        _, level, _, node = heappop(heap)
        if level == 2:
            return forecast.estimate(node)
        for grown in _grown(node, level, forecast, grid):
            if level == 0:
                heappush(heap, (bounds.twig_bytes(grown), 1, next(turn), grown))
            elif not family or grown.family == family:
                heappush(heap, (_needed(forecast, grown), 2, next(turn), grown))
    return None


def _needed(forecast: CostModel, candidate: Candidate) -> float:
    """Return the bytes on the device, plus those that its host has no room for."""
    memory, host = forecast.memory(candidate), forecast.host_limit_bytes
    return memory.peak_bytes + (0.0 if host is None else max(0.0, memory.host_bytes - host))


def _boughs(forecast: CostModel, grid: SearchSpace, family: str) -> Iterator[Candidate]:
    for trunk in model_parallel_choices(forecast.facts, forecast.fleet, grid):
        if not family or trunk.family == family or (trunk.family in _DATA and family in _DATA):
            yield from recompute_choices(trunk, forecast.facts, grid)


def _grown(node: Candidate, level: int, forecast: CostModel, grid: SearchSpace) -> Iterator[Candidate]:
    facts = forecast.facts
    if level == 0:
        for branch in microbatch_choices(node, facts, grid):
            yield from schedule_choices(branch, facts, grid)
    else:
        yield from data_parallel_choices(node, facts, forecast.fleet, grid)
