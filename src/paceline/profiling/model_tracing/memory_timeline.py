"""Memory timelines: a rank's memory at every operation of a step, extrapolated from shallow models to a deep one.

A chain is a sequence of equal blocks. One more block in a chain adds the operations of one block to the middle of every
forward and every backward. The operations before and after stay the same, and with every added block the memory at each
of them grows by the same amount. So the memory at every operation can be extrapolated from two depths. The peak is the
maximum over all operations.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile
from operator import add

from paceline.profiling.model_tracing.memory_tracker import KINDS, MemoryByKind

Bytes = tuple[int, ...]  # of each kind in `memory_tracker.KINDS`
Part = list[tuple[str, Bytes]]  # the name of each operation, and the bytes at this operation
# The same part is recorded for a model and for the model with one more block. The second recording is longer: each loop
# over blocks has one more iteration. The tuple has the position in the shorter recording at which this iteration is
# missing, and the number of its operations.
ExtraIteration = tuple[int, int]


@dataclass
class MemoryTimeline:
    """The bytes of each kind at every operation of a step. Each forward, backward and update is a part."""

    parts: list[Part] = field(default_factory=lambda: [[]])

    def record(self, name: str, num_bytes: Bytes) -> None:
        """Record the bytes that are allocated at this operation."""
        self.parts[-1].append((name, num_bytes))

    def start_part(self) -> None:
        """Start another part, if the current one is not empty."""
        if self.parts[-1]:
            self.parts.append([])


def extrapolate_peak(base: MemoryTimeline, longer: Sequence[tuple[MemoryTimeline, int]]) -> MemoryByKind | None:
    """Return the peak with added blocks, or None if the timelines differ in more than the operations of one block.

    `longer` has a pair for each chain: the timeline of `base` with one more block in this chain, and how many blocks to
    add to the chain.
    """
    if any(len(timeline.parts) != len(base.parts) for timeline, _ in longer):
        return None
    totals: list[Bytes] = []
    for index, part in enumerate(base.parts):
        summands = [[num_bytes for _, num_bytes in part]]
        for longer_timeline, blocks in longer:
            iterations = _find_extra_iterations(part, longer_timeline.parts[index])
            if iterations is None:
                return None
            summands.append(
                [_added_bytes(pair, blocks) for pair in _byte_pairs(part, longer_timeline.parts[index], iterations)]
            )
        totals += [tuple(map(sum, zip(*addends, strict=True))) for addends in zip(*summands, strict=True)]
    peak = max(totals, key=sum, default=())
    return MemoryByKind(**dict(zip(KINDS, peak, strict=False)))


def extrapolate_timeline(base: MemoryTimeline, longer: MemoryTimeline, blocks: int) -> MemoryTimeline | None:
    """Return the timeline with `blocks` more blocks than `base`, or None if it can't be extrapolated.

    `longer` is the timeline with one more block. It may differ from `base` only in the operations of this block.
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
    """Return one part with `blocks` more blocks, or None if the part has no equal iterations around the inserted ones.

    The bytes in the inserted blocks are interpolated between the iterations before and after them.
    """
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
    """Return the bytes that `blocks` more blocks add. `pair` has the bytes without and with one more block."""
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
    """Return the extra iteration of each loop over blocks in `longer_part`, or None if there is another difference.

    The position of an extra iteration is the middle of its loop.
    """
    names, longer_names = [name for name, _ in short_part], [name for name, _ in longer_part]
    iterations: list[ExtraIteration] = []
    matched = num_extra = 0  # equal operations in both parts so far, and operations of extra iterations so far
    while num_extra < len(longer_names) - len(names):
        stop = matched + _common_length(names, longer_names, matched, matched + num_extra)
        remaining = len(longer_names) - len(names) - num_extra
        lengths = _iteration_lengths(longer_names, stop + num_extra, remaining)
        if not lengths:
            return None
        common_lengths = {n: _common_length(names, longer_names, stop, stop + num_extra + n) for n in lengths}
        # prefer the length after which most operations are equal; in a tie, the one with all remaining extra operations
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
    """Return each possible number of operations of an extra iteration that starts at `position`.

    Its operations must equal those just before it.
    """
    return [
        n
        for n in range(1, min(max_length, position) + 1)
        if names[position - n : position] == names[position : position + n]
    ]


def _common_length(names: list[str], longer_names: list[str], start: int, longer_start: int) -> int:
    """Return how many successive operations are equal, beginning at these two positions."""
    pairs = zip(islice(names, start, None), islice(longer_names, longer_start, None), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
