"""A shuffle that can be evaluated at any single position: a pure function of (seed, epoch, index).

A Feistel network is a bijection on 0 to 4^k - 1, where 4^k is the next power of four. A result that is not a valid
index is encrypted again until it is valid (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains",
2002). Time and memory do not depend on the position, so a resume is as cheap as a start.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8  # of the Feistel network
_BLOCK = 1 << 14  # positions whose sample indices are computed and cached together
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Positions = NDArray[np.int64]


class Permutation:
    """The sample order of one epoch. `permutation[a:b]` returns the sample indices at positions a to b - 1."""

    def __init__(self, *, num_samples: int, seed: int, epoch: int) -> None:
        if num_samples < 1:
            raise ValueError(f"a permutation of {num_samples} samples")
        self.num_samples = num_samples
        half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = _round_keys(seed, epoch)
        self._block = -1
        self._cached: Positions = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, span: slice) -> Positions:
        start, stop, _ = span.indices(self.num_samples)
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        first, last = start // _BLOCK, (stop - 1) // _BLOCK
        if first == last:
            return self._indices_of_block(first)[start - first * _BLOCK : stop - first * _BLOCK]
        return self.indices_at(np.arange(start, stop, dtype=np.int64))

    def indices_at(self, positions: Positions) -> Positions:
        """Return the sample indices at these positions, uncached."""
        values = self._encrypt(positions.astype(np.uint64))
        is_invalid = values >= self.num_samples
        while is_invalid.any():
            values[is_invalid] = self._encrypt(values[is_invalid])
            is_invalid = values >= self.num_samples
        return values.astype(np.int64)

    def _indices_of_block(self, block: int) -> Positions:
        if block != self._block:
            start = block * _BLOCK
            stop = min(start + _BLOCK, self.num_samples)
            self._cached = self.indices_at(np.arange(start, stop, dtype=np.int64))
            self._block = block
        return self._cached

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_splitmix64(right ^ key) & self._mask)
        result: NDArray[np.uint64] = (left << self._half_bits) | right
        return result


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"order:{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype=np.uint64)


def _splitmix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIERS[1]
    result: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return result
