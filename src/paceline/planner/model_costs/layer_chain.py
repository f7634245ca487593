"""Represent a model as a chain of parts, in which equal parts are stored once, and cut the chain into stages."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from paceline.errors import LayoutError
from paceline.planner.model_costs.model_profile import LayerProfile, ModelProfile

Counts = tuple[int, ...]  # how often each of `Chain.parts` occurs
_BISECTION_STEPS = 40


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model as a sequence of parts, in which equal blocks are one part."""

    parts: tuple[LayerProfile, ...]
    """The part before the blocks, the part after them, and then the distinct blocks."""
    order: tuple[int, ...]
    """For each block of the model, the index of its part."""
    weights: tuple[float, ...]
    """The work of each part, by which stages are balanced: its FLOPs, or 1 for blocks if no block has FLOPs."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the model. The chain may be cut between two blocks."""
        return len(self.order)

    @cached_property
    def full_counts(self) -> Counts:
        """The number of occurrences of each part in the full model."""
        return self.counts(0, self.num_blocks, first=True, last=True)

    def counts(self, start: int, stop: int, *, first: bool, last: bool) -> Counts:
        """Return how often each part occurs in the blocks `[start, stop)`.

        `first` and `last` tell whether the parts before and after all blocks are included.
        """
        counts = [0] * len(self.parts)
        counts[0], counts[1] = int(first), int(last)
        for index in self.order[start:stop]:
            counts[index] += 1
        return tuple(counts)

    def stage_counts(self, bounds: Sequence[tuple[int, int]]) -> tuple[Counts, ...]:
        """Return how often each part occurs in every stage; `bounds` are the stages as ranges of blocks."""
        end = len(bounds) - 1
        return tuple(
            self.counts(start, stop, first=stage == 0, last=stage == end) for stage, (start, stop) in enumerate(bounds)
        )

    def cut_stages(self, num_stages: int) -> tuple[tuple[int, int], ...]:
        """Return stages of nearly equal work, as ranges `[start, stop)` of blocks.

        Of equally good cuts, choose the one with the fewest blocks in the first stages, which hold the activations of
        the most microbatches. A bisection finds the smallest limit on the work of a stage. Each step of the bisection
        fills stages from the last one backwards, in O(num_stages × log num_blocks).

        Raises:
            LayoutError: there are more stages than blocks.
        """
        if num_stages == 1:
            return ((0, self.num_blocks),)
        if not 1 <= num_stages <= self.num_blocks:
            message = f"{num_stages} stages can't be cut from {self.num_blocks} blocks."
            raise LayoutError(message, hint=f"pp × virtual between 1 and {self.num_blocks}")
        cumulative = [0.0, *accumulate(self.weights[index] for index in self.order)]
        ends = (self.weights[0], self.weights[1])
        low, high = 0.0, cumulative[-1] + sum(ends)
        best = _fill_stages(cumulative, ends, num_stages, high)
        for _ in range(_BISECTION_STEPS):
            middle = (low + high) / 2
            stages = _fill_stages(cumulative, ends, num_stages, middle)
            if stages is None:
                low = middle
            else:
                best, high = stages, middle
        assert best is not None
        return best


def build_chain(profile: ModelProfile) -> Chain:
    """Return the chain of a model. Blocks that differ only in name are one part."""
    parts: list[LayerProfile] = [profile.first, profile.last]
    indices: dict[int, int] = {}
    order = []
    for block in profile.blocks:
        if id(block) not in indices:
            matches = (index for index, part in enumerate(parts[2:], 2) if _is_equal_part(part, block))
            index = next(matches, len(parts))
            if index == len(parts):
                parts.append(block)
            indices[id(block)] = index
        order.append(indices[id(block)])
    weights = tuple(part.flops.evaluate(samples=1, length=profile.length) for part in parts)
    if not any(weights[2:]):
        weights = (0.0, 0.0, *(1.0 for _ in parts[2:]))
    return Chain(parts=tuple(parts), order=tuple(order), weights=weights)


def _is_equal_part(part: LayerProfile, other: LayerProfile) -> bool:
    return {**vars(part), "name": ""} == {**vars(other), "name": ""}


def _fill_stages(
    cumulative: Sequence[float], ends: tuple[float, float], num_stages: int, limit: float
) -> tuple[tuple[int, int], ...] | None:
    """Return stages filled up to the limit, from the last one backwards; None if no such stages exist.

    `cumulative` are the sums of the weights of the blocks before each block. `ends` are the weights of the parts before
    and after all blocks.
    """
    bounds: list[tuple[int, int]] = []
    stop = len(cumulative) - 1
    for stage in reversed(range(num_stages)):
        room = limit - (ends[1] if stage == num_stages - 1 else 0.0) - (ends[0] if stage == 0 else 0.0)
        # the first block with which the stage stays within the limit
        first_block = bisect_left(cumulative, cumulative[stop] - room - 1e-12 * limit)
        start = max(stage, first_block) if stage else 0
        if start < first_block or start >= stop or room < 0:
            return None
        bounds.append((start, stop))
        stop = start
    return tuple(reversed(bounds))
