"""Sharding of one tensor dimension over the ranks, and its propagation through reshapes and slices.

A fused projection has several sections, each sharded separately: a rank holds its piece of every section, in order.
Nothing here reads values, so every rank computes the same result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Fences = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DimSharding:
    """The sharding of dimension `dim`: in every section, rank r holds `[fences[r], fences[r + 1])`."""

    dim: int
    sections: tuple[Fences, ...]

    @cached_property
    def size(self) -> int:
        """Return the size of the whole dimension."""
        return sum(fences[-1] for fences in self.sections)

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the dimension."""
        return len(self.sections[0]) - 1

    def held(self, rank: int) -> int:
        """Return the number of elements along the dimension that a rank holds."""
        return sum(fences[rank + 1] - fences[rank] for fences in self.sections)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the `[start, stop)` ranges of the whole dimension that a rank holds, one per section."""
        found, offset = [], 0
        for fences in self.sections:
            found.append((offset + fences[rank], offset + fences[rank + 1]))
            offset += fences[-1]
        return found

    def at(self, dim: int) -> "DimSharding":
        """Return the same sharding for another dimension."""
        return self if dim == self.dim else DimSharding(dim=dim, sections=self.sections)

    def repeated(self, times: int) -> "DimSharding":
        """Return the sharding after each element is repeated `times` times in a row."""
        return DimSharding(dim=self.dim, sections=tuple(tuple(f * times for f in fences) for fences in self.sections))

    def sliced(self, start: int, stop: int) -> "tuple[int, int] | None":
        """Return the sections `[first, last)` that make up `[start, stop)` exactly, or None."""
        ends = [0]
        for fences in self.sections:
            ends.append(ends[-1] + fences[-1])
        if start not in ends or stop not in ends or stop <= start:
            return None
        return ends.index(start), ends.index(stop)


def even_cut(size: int, *, ranks: int, sections: Sequence[int] = (), dim: int = 0, unit: int = 1) -> DimSharding:
    """Cut each section as evenly as possible in multiples of `unit`; without `sections` there is one section."""
    sizes = tuple(sections) or (size,)
    assert sum(sizes) == size
    return DimSharding(
        dim=dim, sections=tuple(tuple(n // unit * r // ranks * unit for r in range(ranks + 1)) for n in sizes)
    )


@dataclass(frozen=True, kw_only=True)
class IncompatibleReshape:
    """The reason why a sharding does not survive a reshape or slice, and the source sharding that would."""

    what: str
    sections: tuple[int, ...] = ()
    heads: int | None = None


@lru_cache(maxsize=4096)
def reshape_cut(cut: DimSharding, old: tuple[int, ...], new: tuple[int, ...]) -> DimSharding | IncompatibleReshape:
    """Return the sharding after a tensor of whole shape `old` is reshaped (row-major) to `new`, of equal size."""
    for before, after in _groups(old, new):
        if cut.dim in before:
            return _within(cut, [old[d] for d in before], cut.dim - before[0], [new[d] for d in after], after)
    return IncompatibleReshape(what=f"a reshape of {list(old)} to {list(new)}")


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of dimensions with equal products."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        before, after, a, b = [], [], 1, 1
        if i < len(old):
            before, a, i = [i], old[i], i + 1
        if j < len(new):
            after, b, j = [j], new[j], j + 1
        while a != b:
            if (a < b and i < len(old)) or j >= len(new):
                if i >= len(old):
                    return []
                before, a, i = [*before, i], a * old[i], i + 1
            else:
                after, b, j = [*after, j], b * new[j], j + 1
        found.append((before, after))
    return found


def _within(
    cut: DimSharding, old: list[int], at: int, new: list[int], dims: list[int]
) -> DimSharding | IncompatibleReshape:
    inner = math.prod(old[at + 1 :])
    flat = [tuple(f * inner for f in fences) for fences in cut.sections] * math.prod(old[:at])
    for q, size in enumerate(new):
        sections = _unflattened(flat, outer=math.prod(new[:q]), inner=math.prod(new[q + 1 :]), size=size)
        if sections is not None:
            return DimSharding(dim=dims[q], sections=sections)
    return _advice(cut, old, new)


def _unflattened(flat: list[Fences], *, outer: int, inner: int, size: int) -> tuple[Fences, ...] | None:
    if size == 0 or outer == 0 or inner == 0 or len(flat) % outer:
        return None
    each = len(flat) // outer
    pattern = flat[:each]
    if sum(f[-1] for f in pattern) != size * inner or any(flat[i] != pattern[i % each] for i in range(len(flat))):
        return None
    if any(fence % inner for fences in pattern for fence in fences):
        return None
    return tuple(tuple(fence // inner for fence in fences) for fences in pattern)


def _advice(cut: DimSharding, old: list[int], new: list[int]) -> IncompatibleReshape:
    """Suggest a sharding: a small leading factor is a fused projection, a trailing one that the cut splits a head."""
    what = f"a reshape of {'×'.join(map(str, old))} to {'×'.join(map(str, new))}"
    real = [n for n in new if n > 1]
    if len(old) == 1 and len(cut.sections) == 1 and len(real) == 3 and real[0] <= 4 and old[0] % real[0] == 0:
        return IncompatibleReshape(what=what, sections=(old[0] // real[0],) * real[0], heads=real[1])
    heads = real[-2] if len(real) > 1 and old[-1] % real[-1] == 0 else 1
    return IncompatibleReshape(what=what, heads=heads)
