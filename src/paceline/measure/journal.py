"""What a rank held at every operation of a step; and from two steps that are less deep, at those of a deep one.

A block more in each chain puts the operations of one block into the middle of every forward and every backward. All
that lies before and after them stays what it was, and what is held there grows by as much with each further block. So
every operation's own amount is carried on, and the most is looked for among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from paceline.measure.held import KINDS, Held

Bytes = tuple[int, ...]


@dataclass
class Journal:
    """Bytes of each kind (`held.KINDS`) at every operation, in parts: a forward, a backward, an update."""

    parts: list[list[tuple[str, Bytes]]] = field(default_factory=lambda: [[]])

    def note(self, name: str, held: Bytes) -> None:
        """So much was there at this operation."""
        self.parts[-1].append((name, held))

    def turn(self) -> None:
        """Another part begins."""
        if self.parts[-1]:
            self.parts.append([])


def peak_of(base: Journal, more: Sequence[tuple[Journal, int]]) -> Held | None:
    """The most at once with so many further blocks: each of `more` has one block where they come, and their number.

    None where the steps are not alike but for those blocks.
    """
    if any(len(journal.parts) != len(base.parts) for journal, _ in more):
        return None
    found: list[Bytes] = []
    for place, part in enumerate(base.parts):
        rows = [[held for _, held in part]]
        for journal, blocks in more:
            pairs = _pairs(part, journal.parts[place])
            if pairs is None:
                return None
            rows.append([tuple((b - a) * blocks for a, b in zip(*pair, strict=True)) for pair in pairs])
        found += [tuple(map(sum, zip(*each, strict=True))) for each in zip(*rows, strict=True)]
    most = max(found, key=sum, default=())
    return Held(**dict(zip(KINDS, most, strict=False)))


def _pairs(few: list[tuple[str, Bytes]], more: list[tuple[str, Bytes]]) -> list[tuple[Bytes, Bytes]] | None:
    """What each operation of `few` held there and in `more`, where loops over blocks go round once more."""
    names, others = [name for name, _ in few], [name for name, _ in more]
    found: list[int] = []
    added = 0
    while added < len(others) - len(names):
        stop = len(found) + _alike(names, others, len(found), len(found) + added)
        rounds = _rounds(others, stop + added, len(others) - len(names) - added)
        if not rounds:
            return None
        once = max(rounds, key=lambda n: _alike(names, others, stop, stop + added + n))
        start = stop
        while start > len(found) and others[start - 1 + added] == others[start - 1 + added + once]:
            start -= 1
        turn = (start + stop) // 2  # as far from what comes before the loop as from what comes after it
        found += range(len(found) + added, turn + added)
        added += once
        found += range(turn + added, stop + added)
    found += range(len(found) + added, len(others))
    if names != [others[at] for at in found]:
        return None
    return [(held, more[at][1]) for (_, held), at in zip(few, found, strict=True)]


def _rounds(names: list[str], at: int, most: int) -> list[int]:
    """How many operations a loop may have that goes round once more there: as many just before are the same."""
    return [n for n in range(1, min(most, at) + 1) if names[at - n : at] == names[at : at + n]]


def _alike(names: list[str], others: list[str], start: int, other: int) -> int:
    """How many they have in common from there on."""
    pairs = zip(islice(names, start, None), islice(others, other, None), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
