"""The candidate of a family that needs the least memory: how near a family that does not fit comes to it."""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from paceline.plan.bounds import Bounds
from paceline.plan.candidate import Candidate
from paceline.plan.estimate import Estimate
from paceline.plan.forecast import Forecast
from paceline.plan.grid import Grid, boughs, branches, leaves, trunks, twigs

_DATA = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp")


def least_memory(forecast: Forecast, *, grid: Grid, family: str = "") -> Estimate | None:
    """By branch and bound over bytes, of one family or of all; None where the grid has no such candidate."""
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


def _needed(forecast: Forecast, candidate: Candidate) -> float:
    """Bytes on the device, and those that its host has no room for."""
    memory, host = forecast.memory(candidate), forecast.host_limit_bytes
    return memory.peak_bytes + (0.0 if host is None else max(0.0, memory.host_bytes - host))


def _boughs(forecast: Forecast, grid: Grid, family: str) -> Iterator[Candidate]:
    for trunk in trunks(forecast.facts, forecast.fleet, grid):
        if not family or trunk.family == family or (trunk.family in _DATA and family in _DATA):
            yield from boughs(trunk, forecast.facts, grid)


def _grown(node: Candidate, level: int, forecast: Forecast, grid: Grid) -> Iterator[Candidate]:
    facts = forecast.facts
    if level == 0:
        for branch in branches(node, facts, grid):
            yield from twigs(branch, facts, grid)
    else:
        yield from leaves(node, facts, forecast.fleet, grid)
