"""The chain of a model's parts, with equal parts stored once, and its division into balanced stages."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from paceline.errors import LayoutError
from paceline.planner.model_costs.model_profile import LayerProfile, ModelProfile

Counts = tuple[int, ...]
_ROUNDS = 40


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The distinct parts of a model, the two ends first; `order` is the index of each block's part."""

    parts: tuple[LayerProfile, ...]
    order: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def num_blocks(self) -> int:
        """The number of blocks, between which the chain may be cut."""
        return len(self.order)

    @cached_property
    def whole(self) -> Counts:
        """The number of each part in the whole model."""
        return self.counts(0, self.num_blocks, first=True, last=True)

    def counts(self, start: int, stop: int, *, first: bool, last: bool) -> Counts:
        """Return how many of each part these blocks contain, with the first and the last part if asked."""
        found = [0] * len(self.parts)
        found[0], found[1] = int(first), int(last)
        for index in self.order[start:stop]:
            found[index] += 1
        return tuple(found)

    def stages(self, bounds: Sequence[tuple[int, int]]) -> tuple[Counts, ...]:
        """Return how many of each part every stage has."""
        end = len(bounds) - 1
        return tuple(
            self.counts(start, stop, first=stage == 0, last=stage == end) for stage, (start, stop) in enumerate(bounds)
        )

    def cut(self, num_stages: int) -> tuple[tuple[int, int], ...]:
        """Return stages of nearly equal work; of equally good cuts, the one with fewest blocks in its first stages.

        First stages hold the activations of most microbatches. This searches for the least limit that all stages can
        keep; each trial fills stages from the last one on, in O(num_stages × log num_blocks).

        Raises:
            LayoutError: there are more stages than blocks.
        """
        if num_stages == 1:
            return ((0, self.num_blocks),)
        if not 1 <= num_stages <= self.num_blocks:
            what = f"{num_stages} stages can't be cut from {self.num_blocks} blocks."
            raise LayoutError(what, hint=f"pp × virtual between 1 and {self.num_blocks}")
        sums = [0.0, *accumulate(self.weights[index] for index in self.order)]
        ends = (self.weights[0], self.weights[1])
        low, high = 0.0, sums[-1] + sum(ends)
        best = _fill(sums, ends, num_stages, high)
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            found = _fill(sums, ends, num_stages, middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        assert best is not None
        return best


def chain_of(facts: ModelProfile) -> Chain:
    """Return the model's chain. Parts that differ only in name are equal; a part's weight is its FLOPs."""
    parts: list[LayerProfile] = [facts.first, facts.last]
    seen: dict[int, int] = {}
    order = []
    for block in facts.blocks:
        if id(block) not in seen:
            alike = (place for place, part in enumerate(parts[2:], 2) if _is_alike(part, block))
            place = next(alike, len(parts))
            if place == len(parts):
                parts.append(block)
            seen[id(block)] = place
        order.append(seen[id(block)])
    weights = tuple(part.flops.at(samples=1, length=facts.length) for part in parts)
    if not any(weights[2:]):
        weights = (0.0, 0.0, *(1.0 for _ in parts[2:]))
    return Chain(parts=tuple(parts), order=tuple(order), weights=weights)


def _is_alike(one: LayerProfile, other: LayerProfile) -> bool:
    return {**vars(one), "name": ""} == {**vars(other), "name": ""}


def _fill(
    sums: Sequence[float], ends: tuple[float, float], num_stages: int, limit: float
) -> tuple[tuple[int, int], ...] | None:
    """Return stages filled from the last one on, up to the limit; None if blocks are left over."""
    bounds: list[tuple[int, int]] = []
    stop = len(sums) - 1
    for stage in reversed(range(num_stages)):
        room = limit - (ends[1] if stage == num_stages - 1 else 0.0) - (ends[0] if stage == 0 else 0.0)
        least = bisect_left(sums, sums[stop] - room - 1e-12 * limit)  # the first block that stays within the limit
        start = max(stage, least) if stage else 0
        if start < least or start >= stop or room < 0:
            return None
        bounds.append((start, stop))
        stop = start
    return tuple(reversed(bounds))
