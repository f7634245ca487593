"""Estimate the memory traffic of a block's operations other than matmuls after a compiler has fused them.

A compiler fuses a chain of operations without a matmul into one kernel. The kernel reads each input of the chain once.
It writes only the results that are read outside the chain: by a matmul, a later chain or the next block. The other
results stay in registers.
"""

from collections.abc import Iterable

from torch import Tensor


class Fusion:
    """A model of fusion. It receives the operations of a block in order. Each method returns moved bytes."""

    def __init__(self) -> None:
        # by storage id: the bytes of results that are not written to memory
        self._unwritten_bytes: dict[int, int] = {}
        self._chain_results: set[int] = set()
        self._chain_inputs: set[int] = set()

    def add_operation(self, inputs: Iterable[Tensor], results: Iterable[Tensor]) -> float:
        """Add an operation other than a matmul to the current chain, and return the bytes moved for its inputs.

        An input is read once per chain. A result of an earlier chain that was not written yet is written first.
        """
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
        """End the current chain with a matmul, and return the bytes that the chain writes for the matmul."""
        num_bytes = self.end_chain(inputs)
        for tensor in results:
            self._unwritten_bytes.pop(_key(tensor), None)
        return num_bytes

    def end_chain(self, next_inputs: Iterable[Tensor]) -> float:
        """End the current chain. Return the bytes that it must write because `next_inputs` are read after it."""
        self._chain_results.clear()
        self._chain_inputs.clear()
        return float(sum(self._unwritten_bytes.pop(_key(tensor), 0) for tensor in next_inputs))


def _key(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
