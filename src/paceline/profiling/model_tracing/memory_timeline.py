"""Memory timelines: a rank's memory at every operation of a step, extrapolated from two shallow models to a deep one.

One more block in each chain adds the operations of one block to the middle of every forward and every backward. All
operations before and after stay the same, and the memory at each grows by the same amount with every added block. So
the memory at every operation is extrapolated, and the peak is the maximum over all of them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile
from operator import add

from paceline.profiling.model_tracing.memory_tracker import KINDS, MemoryByKind

Bytes = tuple[int, ...]  # of each kind
Part = list[tuple[str, Bytes]]  # the name of each operation, with the bytes at this time
ExtraIteration = tuple[int, int]  # its position, and its number of operations


@dataclass
class MemoryTimeline:
    """The bytes of each kind (`memory_tracker.KINDS`) by operation, in parts: a forward, a backward, an update."""

    parts: list[Part] = field(default_factory=lambda: [[]])

    def record(self, name: str, num_bytes: Bytes) -> None:
        """Record the bytes held at this operation."""
        self.parts[-1].append((name, num_bytes))

    def start_part(self) -> None:
        """Start another part."""
        if self.parts[-1]:
            self.parts.append([])


def extrapolate_peak(base: MemoryTimeline, longer: Sequence[tuple[MemoryTimeline, int]]) -> MemoryByKind | None:
    """Return the peak with added blocks, or None if the steps differ in anything but those blocks.

    `longer` has a pair per chain of blocks: the timeline with one more block, and how many blocks to add.
    """
    if any(len(timeline.parts) != len(base.parts) for timeline, _ in longer):
        return None
    totals: list[Bytes] = []
    for index, part in enumerate(base.parts):
        summands = [[num_bytes for _, num_bytes in part]]
        for journal, blocks in longer:
            iterations = _find_extra_iterations(part, journal.parts[index])
            if iterations is None:
                return None
            summands.append(
                [_added_bytes(pair, blocks) for pair in _byte_pairs(part, journal.parts[index], iterations)]
            )
        totals += [tuple(map(sum, zip(*addends, strict=True))) for addends in zip(*summands, strict=True)]
    peak = max(totals, key=sum, default=())
    return MemoryByKind(**dict(zip(KINDS, peak, strict=False)))


def extrapolate(base: MemoryTimeline, longer: MemoryTimeline, blocks: int) -> MemoryTimeline | None:
    """Return the timeline with `blocks` more than `base`, or None if the steps differ in anything but those blocks.

    `longer` is the timeline with one more block.
    """
    if len(longer.parts) != len(base.parts):
        return None
    extrapolated = MemoryTimeline(parts=[])
    for short_part, longer_part in zip(base.parts, longer.parts, strict=True):
        iterations = _find_extra_iterations(short_part, longer_part)
        part = None if iterations is None else _extrapolate_part(short_part, longer_part, iterations, blocks)
        if part is None:
            return None
        extrapolated.parts.append(part)
    return extrapolated


def _extrapolate_part(
    short_part: Part, longer_part: Part, iterations: Sequence[ExtraIteration], blocks: int
) -> Part | None:
    """Return the operations of one part with `blocks` more; the bytes in each inserted block are interpolated."""
    added = [_added_bytes(pair, blocks) for pair in _byte_pairs(short_part, longer_part, iterations)]
    totals = [(name, tuple(map(add, base, extra))) for (name, base), extra in zip(short_part, added, strict=True)]
    operations: Part = []
    previous_end = 0
    for position, num_operations in iterations:
        operations += totals[previous_end:position]
        preceding = totals[max(0, position - num_operations) : position]
        following = totals[position : position + num_operations]
        if [name for name, _ in preceding] != [name for name, _ in following] or len(preceding) != num_operations:
            return None
        for block in range(1, blocks + 1):
            for (name, low), (_, high) in zip(preceding, following, strict=True):
                steps = [divmod((b - a) * block, blocks + 1) for a, b in zip(low, high, strict=True)]
                if any(remainder for _, remainder in steps):
                    return None
                operations.append((name, tuple(a + step for a, (step, _) in zip(low, steps, strict=True))))
        previous_end = position
    return operations + totals[previous_end:]


def _added_bytes(pair: tuple[Bytes, Bytes], blocks: int) -> Bytes:
    return tuple((b - a) * blocks for a, b in zip(*pair, strict=True))


def _byte_pairs(short_part: Part, longer_part: Part, iterations: Sequence[ExtraIteration]) -> list[tuple[Bytes, Bytes]]:
    """Return the bytes at each operation of `short_part`, and at the same operation of `longer_part`."""
    positions = [position for position, _ in iterations]
    num_extra = list(accumulate((num_operations for _, num_operations in iterations), initial=0))
    return [
        (num_bytes, longer_part[index + num_extra[bisect_right(positions, index)]][1])
        for index, (_, num_bytes) in enumerate(short_part)
    ]


def _find_extra_iterations(short_part: Part, longer_part: Part) -> list[ExtraIteration] | None:
    """Return where `longer_part` has one more iteration of a loop over blocks, and of how many operations.

    The position is the middle of the loop. Return None if there is another difference.
    """
    names, longer_names = [name for name, _ in short_part], [name for name, _ in longer_part]
    iterations: list[ExtraIteration] = []
    matched = num_extra = 0
    while num_extra < len(longer_names) - len(names):
        stop = matched + _common_length(names, longer_names, matched, matched + num_extra)
        remaining = len(longer_names) - len(names) - num_extra
        lengths = _iteration_lengths(longer_names, stop + num_extra, remaining)
        if not lengths:
            return None
        common_lengths = {n: _common_length(names, longer_names, stop, stop + num_extra + n) for n in lengths}
        # a loop that continues to the end takes all remaining operations
        num_operations = max(lengths, key=lambda n: (common_lengths[n], n == remaining))
        start = stop
        while (
            start > matched
            and longer_names[start - 1 + num_extra] == longer_names[start - 1 + num_extra + num_operations]
        ):
            start -= 1
        iterations.append(((start + stop) // 2, num_operations))
        matched, num_extra = stop, num_extra + num_operations
    return iterations if names[matched:] == longer_names[matched + num_extra :] else None


def _iteration_lengths(names: list[str], position: int, max_length: int) -> list[int]:
    """Return the possible lengths of a loop's extra iteration: it equals the operations just before it."""
    return [
        n
        for n in range(1, min(max_length, position) + 1)
        if names[position - n : position] == names[position : position + n]
    ]


def _common_length(names: list[str], longer_names: list[str], start: int, longer_start: int) -> int:
    """Return how many operations are equal in both from these positions on."""
    pairs = zip(islice(names, start, None), islice(longer_names, longer_start, None), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
