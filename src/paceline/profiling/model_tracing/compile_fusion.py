"""Compiler fusion: the memory traffic that remains between a block's matmuls when it is compiled.

A compiler fuses a chain of operations that are not matmuls into one kernel. It reads each of its inputs once, and
writes only the results that a matmul or the next block reads. Other results of the chain stay in registers.
"""

from collections.abc import Iterable

from torch import Tensor


class Fusion:
    """A model of fusion that receives a block's operations in order; each method returns moved bytes."""

    def __init__(self) -> None:
        self._unwritten_bytes: dict[int, int] = {}
        self._chain_results: set[int] = set()
        self._chain_inputs: set[int] = set()

    def add_operation(self, inputs: Iterable[Tensor], results: Iterable[Tensor]) -> float:
        """Return the bytes that an operation which is not a matmul adds to its chain."""
        num_bytes = 0.0
        for tensor in inputs:
            key = _key(tensor)
            if key not in self._chain_results and key not in self._chain_inputs:
                self._chain_inputs.add(key)
                num_bytes += self._unwritten_bytes.pop(key, 0) + min(tensor.nbytes, tensor.untyped_storage().nbytes())
        for tensor in results:
            self._chain_results.add(_key(tensor))
            self._unwritten_bytes[_key(tensor)] = tensor.nbytes
        return num_bytes

    def add_matmul(self, inputs: Iterable[Tensor], results: Iterable[Tensor]) -> float:
        """Return the bytes that are written before a matmul, which ends the current chain."""
        num_bytes = self.end_chain(inputs)
        for tensor in results:
            self._unwritten_bytes.pop(_key(tensor), None)
        return num_bytes

    def end_chain(self, next_inputs: Iterable[Tensor]) -> float:
        """Return the bytes that the chain must write for the next reader, whose inputs are given."""
        self._chain_results.clear()
        self._chain_inputs.clear()
        return float(sum(self._unwritten_bytes.pop(_key(tensor), 0) for tensor in next_inputs))


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
