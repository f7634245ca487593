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

Bytes = tuple[int, ...]
Part = list[tuple[str, Bytes]]
Turn = tuple[int, int]


@dataclass
class MemoryTimeline:
    """The bytes of each kind (`memory_tracker.KINDS`) by operation, in parts: a forward, a backward, an update."""

    parts: list[Part] = field(default_factory=lambda: [[]])

    def note(self, name: str, held: Bytes) -> None:
        """Record the bytes held at this operation."""
        self.parts[-1].append((name, held))

    def turn(self) -> None:
        """Start another part."""
        if self.parts[-1]:
            self.parts.append([])


def peak_of(base: MemoryTimeline, more: Sequence[tuple[MemoryTimeline, int]]) -> MemoryByKind | None:
    """Return the peak with added blocks, or None if the steps differ in anything but those blocks.

    `longer` has a pair per chain of blocks: the timeline with one more block, and how many blocks to add.
    """
    if any(len(journal.parts) != len(base.parts) for journal, _ in more):
        return None
    found: list[Bytes] = []
    for place, part in enumerate(base.parts):
        rows = [[held for _, held in part]]
        for journal, blocks in more:
            turns = _turns(part, journal.parts[place])
            if turns is None:
                return None
            rows.append([_grown(pair, blocks) for pair in _pairs(part, journal.parts[place], turns)])
        found += [tuple(map(sum, zip(*each, strict=True))) for each in zip(*rows, strict=True)]
    most = max(found, key=sum, default=())
    return MemoryByKind(**dict(zip(KINDS, most, strict=False)))


def extrapolate(base: MemoryTimeline, more: MemoryTimeline, blocks: int) -> MemoryTimeline | None:
    """Return the timeline with `blocks` more than `base`; `longer` has one more. None if the others differ."""
    if len(more.parts) != len(base.parts):
        return None
    found = MemoryTimeline(parts=[])
    for few, other in zip(base.parts, more.parts, strict=True):
        turns = _turns(few, other)
        lines = None if turns is None else _lines(few, other, turns, blocks)
        if lines is None:
            return None
        found.parts.append(lines)
    return found


def _lines(few: Part, more: Part, turns: Sequence[Turn], blocks: int) -> Part | None:
    """Return the operations of one part, with each inserted block's bytes interpolated."""
    grown = [_grown(pair, blocks) for pair in _pairs(few, more, turns)]
    held = [(name, tuple(map(add, own, more_))) for (name, own), more_ in zip(few, grown, strict=True)]
    found: Part = []
    before = 0
    for turn, once in turns:
        found += held[before:turn]
        last, following = held[max(0, turn - once) : turn], held[turn : turn + once]
        if [name for name, _ in last] != [name for name, _ in following] or len(last) != once:
            return None
        for block in range(1, blocks + 1):
            for (name, low), (_, high) in zip(last, following, strict=True):
                steps = [divmod((b - a) * block, blocks + 1) for a, b in zip(low, high, strict=True)]
                if any(rest for _, rest in steps):
                    return None
                found.append((name, tuple(a + step for a, (step, _) in zip(low, steps, strict=True))))
        before = turn
    return found + held[before:]


def _grown(pair: tuple[Bytes, Bytes], blocks: int) -> Bytes:
    return tuple((b - a) * blocks for a, b in zip(*pair, strict=True))


def _pairs(few: Part, more: Part, turns: Sequence[Turn]) -> list[tuple[Bytes, Bytes]]:
    """Return the bytes at each operation of `short_part`, and at the same operation of `longer_part`."""
    ends = [turn for turn, _ in turns]
    added = list(accumulate((once for _, once in turns), initial=0))
    return [(held, more[at + added[bisect_right(ends, at)]][1]) for at, (_, held) in enumerate(few)]


def _turns(few: Part, more: Part) -> list[Turn] | None:
    """Return the positions at which `longer_part` has one more iteration of a loop over blocks, and its operations.

    The position is the middle of the loop. Return None if there is another difference.
    """
    names, others = [name for name, _ in few], [name for name, _ in more]
    found: list[Turn] = []
    known = added = 0
    while added < len(others) - len(names):
        stop = known + _alike(names, others, known, known + added)
        left = len(others) - len(names) - added
        rounds = _rounds(others, stop + added, left)
        if not rounds:
            return None
        runs = {n: _alike(names, others, stop, stop + added + n) for n in rounds}
        # a loop that continues to the end takes all remaining operations
        once = max(rounds, key=lambda n: (runs[n], n == left))
        start = stop
        while start > known and others[start - 1 + added] == others[start - 1 + added + once]:
            start -= 1
        found.append(((start + stop) // 2, once))
        known, added = stop, added + once
    return found if names[known:] == others[known + added :] else None


def _rounds(names: list[str], at: int, most: int) -> list[int]:
    """Return the possible lengths of a loop's extra iteration: it equals the operations just before it."""
    return [n for n in range(1, min(most, at) + 1) if names[at - n : at] == names[at : at + n]]


def _alike(names: list[str], others: list[str], start: int, other: int) -> int:
    """Return how many operations are equal in both from these positions on."""
    pairs = zip(islice(names, start, None), islice(others, other, None), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
