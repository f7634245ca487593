"""What a compiler leaves of the bytes that a block moves between its products.

It joins operations that are no products: of a chain of them what comes from outside is read once, and what a product or
the next block takes is written once. What a chain makes and uses itself stays in registers.
"""

from collections.abc import Iterable

from torch import Tensor


class Fusion:
    """Hears of a block's operations in turn; each answer is in bytes."""

    def __init__(self) -> None:
        self._unwritten: dict[int, int] = {}
        self._inside: set[int] = set()
        self._read: set[int] = set()

    def joined(self, given: Iterable[Tensor], made: Iterable[Tensor]) -> float:
        """Return what an operation that is no product adds to its chain."""
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
        """Return what has to be written for a product, which ends the chain before it."""
        found = self.end(given)
        for tensor in made:
            self._unwritten.pop(_key(tensor), None)
        return found

    def end(self, given: Iterable[Tensor]) -> float:
        """Return what has to be written of these for whoever comes next."""
        self._inside.clear()
        self._read.clear()
        return float(sum(self._unwritten.pop(_key(tensor), 0) for tensor in given))


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
