"""Changes that would make a candidate fit: its neighbours on the grid, with what each costs in time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.console.formatting import format_change, format_precise_duration, format_size
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.search.search_space import SearchSpace, is_on, micro_batch_sizes

_AXES = ("pp", "tp", "cp")
_MOST = 3
_DEEP = 2


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change, the estimate after it, and the seconds that it adds to the step (negative if it saves time)."""

    says: str
    estimate: Estimate
    seconds: float

    def __str__(self) -> str:
        """Return e.g. `remat=full: 61.2 GiB, +2.1 s a step (+14%)`."""
        before = self.estimate.step_seconds - self.seconds
        sign = "+" if self.seconds >= 0 else "-"
        peak = format_size(round(self.estimate.peak_bytes))
        seconds, share = format_precise_duration(abs(self.seconds)), format_change(self.seconds / before)
        return f"{self.says}: {peak}, {sign}{seconds} per step ({share})"


def cheapest_changes(forecast: CostModel, estimate: Estimate, *, grid: SearchSpace) -> tuple[Change, ...]:
    """Return the three fastest candidates that fit, one change away; two changes away if none is; else none."""
    seen = {estimate.candidate}
    edge: list[tuple[str, Candidate]] = [("", estimate.candidate)]
    for _ in range(_DEEP):
        edge = [
            (f"{said}, {says}" if said else says, other)
            for said, candidate in edge
            for says, other in neighbours(candidate, forecast, grid)
            if other not in seen and not seen.add(other)  # type: ignore[func-returns-value]
        ]
        found = [(says, forecast.estimate(other)) for says, other in edge]
        fit = sorted(((says, one) for says, one in found if one.fits), key=lambda pair: pair[1].step_seconds)
        if fit:
            return tuple(
                Change(says=says, estimate=one, seconds=one.step_seconds - estimate.step_seconds)
                for says, one in fit[:_MOST]
            )
    return ()


def neighbours(candidate: Candidate, forecast: CostModel, grid: SearchSpace) -> Iterator[tuple[str, Candidate]]:
    """Yield the description and the candidate of each change on the grid that may need less memory.

    The ranks and the training stay the same.
    """
    for says, other in _all(candidate, forecast, grid):
        if is_on(other, forecast.facts, forecast.fleet, grid):
            yield says, other


def _all(candidate: Candidate, forecast: CostModel, grid: SearchSpace) -> Iterator[tuple[str, Candidate]]:
    c = candidate
    for remat in grid.remat[grid.remat.index(c.remat) + 1 :] if c.remat in grid.remat else ():
        yield f"remat={remat}", replace(c, remat=remat)
    sizes = micro_batch_sizes(forecast.facts.global_batch_size, c.replicas, grid)
    for smaller in sorted((n for n in sizes if n < c.micro_batch_size), reverse=True):
        yield f"micro_batch_size {c.micro_batch_size} -> {smaller}", replace(c, micro_batch_size=smaller)
    if not c.sequence and c.tp > 1:
        yield "sequence=true", replace(c, sequence=True)
    if c.schedule != "1f1b":
        yield "schedule=1f1b", replace(c, schedule="1f1b", virtual=1)
    yield from _shared(c, grid)
    for axis in _AXES:
        yield from _split(c, axis)


def _shared(c: Candidate, grid: SearchSpace) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates that shard more of the state among the replicas, or offload more to the host."""
    for zero in grid.zero:
        if c.replicas > 1 and (zero > c.zero or c.dp_replicate > 1):
            shards = replace(c, dp_replicate=1, dp_shard=c.replicas, zero=zero)
            yield f"dp_shard={c.replicas}{'' if zero == 3 else f',zero={zero}'}", shards
    for offload in grid.offload:
        if len(offload) > len(c.offload):
            yield f"offload={'+'.join(offload)}", replace(c, offload=offload)


def _split(c: Candidate, axis: str) -> Iterator[tuple[str, Candidate]]:
    """Yield candidates with twice as many ranks on a model axis and half as many replicas."""
    twice = 2 * int(getattr(c, axis))
    for data in ("dp_replicate", "dp_shard"):
        own = int(getattr(c, data))
        if own % 2 == 0:
            zero = 0 if data == "dp_shard" and own == 2 else c.zero
            made = {axis: twice, data: own // 2, "zero": zero}
            yield f"{axis}={twice} ({data}={own // 2})", _replaced(c, made)


def _replaced(c: Candidate, made: dict[str, int]) -> Candidate:
    own = {name: getattr(c, name) for name in c.__dataclass_fields__} | made
    if not own["zero"]:
        own |= {"offload": (), "params": "fp32"}
    return Candidate(**own)
