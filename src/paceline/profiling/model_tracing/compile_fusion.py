"""Compiler fusion: the memory traffic that remains between a block's matmuls when it is compiled.

A compiler fuses operations that are not matmuls: a chain of them reads each outside input once, and writes once what a
matmul or the next block reads. Values that are created and used within a chain stay in registers.
"""

from collections.abc import Iterable

from torch import Tensor


class Fusion:
    """A model of fusion that receives a block's operations in order; each method returns moved bytes."""

    def __init__(self) -> None:
        self._unwritten: dict[int, int] = {}
        self._inside: set[int] = set()
        self._read: set[int] = set()

    def joined(self, given: Iterable[Tensor], made: Iterable[Tensor]) -> float:
        """Return the bytes that an operation which is not a matmul adds to its chain."""
        found = 0.0
        for tensor in given:
            key = _key(tensor)
            if key not in self._inside and key not in self._read:
                self._read.add(key)
                found += self._unwritten.pop(key, 0) + min(tensor.nbytes, tensor.untyped_storage().nbytes())
        for tensor in made:
            self._inside.add(_key(tensor))
            self._unwritten[_key(tensor)] = tensor.nbytes
        return found

    def product(self, given: Iterable[Tensor], made: Iterable[Tensor]) -> float:
        """Return the bytes that are written before a matmul, which ends the current chain."""
        found = self.end(given)
        for tensor in made:
            self._unwritten.pop(_key(tensor), None)
        return found

    def end(self, given: Iterable[Tensor]) -> float:
        """Return the bytes of these tensors that must be written for the next reader."""
        self._inside.clear()
        self._read.clear()
        return float(sum(self._unwritten.pop(_key(tensor), 0) for tensor in given))


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
