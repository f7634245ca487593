"""Codecs, which pack the numbers of gradients into bytes.

A packed tensor has either one row for each rank, which is sent to that rank, or a single row, which is sent to all
ranks.
"""

from typing import Protocol

import torch
from torch import Tensor

_SCALE_BYTES = 4
_FLOAT16_EXPONENT = 15
_INT8_MAX = 127.0
_MIN_EXPONENT, _MAX_EXPONENT = -126, 127  # range of exponents with full precision in float32


class Codec(Protocol):
    """A conversion of numbers to bytes and back. `block` numbers share a scale; a row consists of complete blocks."""

    block: int

    def pack(self, values: Tensor) -> Tensor:
        """Pack `[rows, numbers]` into bytes, `[rows, bytes]`."""

    def unpack(self, packed: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return the rounded numbers."""

    def num_bytes(self, numbers: int) -> int:
        """Return the number of bytes of a row of this many numbers."""


class Bf16:
    """A codec for bfloat16, the upper half of a float32: 8 bits of precision, every exponent."""

    block = 1

    def pack(self, values: Tensor) -> Tensor:
        """Round to the nearest bfloat16."""
        return values.to(torch.bfloat16).view(torch.uint8)

    def unpack(self, packed: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return exactly the bfloat16 values that were packed."""
        return packed.view(torch.bfloat16).to(dtype)

    def num_bytes(self, numbers: int) -> int:
        """Return two bytes per number."""
        return 2 * numbers


class BlockScaledCodec:
    """A codec with float16 numbers (`is_float`) or int8 numbers, and one float32 scale per block.

    If a block's scale is infinite or NaN, so are all numbers of the block after unpacking.
    """

    def __init__(self, *, block: int, is_float: bool) -> None:
        self.block = block
        self._is_float = is_float
        self._dtype = torch.float16 if is_float else torch.int8

    def pack(self, values: Tensor) -> Tensor:
        """Pack each row as the scales of its blocks, followed by its numbers."""
        blocks = values.view(len(values), -1, self.block)
        scale = (_float16_scale if self._is_float else _int8_scale)(blocks.abs().amax(-1))
        divisor = torch.where(torch.isfinite(scale) & (scale > 0.0), scale, 1.0).to(values.dtype)
        scaled = blocks / divisor.unsqueeze(-1)
        if not self._is_float:
            scaled = scaled.nan_to_num_(nan=0.0).clamp_(-_INT8_MAX, _INT8_MAX).round_()
        numbers = scaled.to(self._dtype).view(len(values), -1).view(torch.uint8)
        return torch.cat([scale.view(torch.uint8), numbers], dim=1)

    def unpack(self, packed: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply each number by the scale of its block."""
        num_rows = len(packed)
        num_blocks = packed.shape[1] // (_SCALE_BYTES + self.block * self._dtype.itemsize)
        num_scale_bytes = _SCALE_BYTES * num_blocks
        scale = packed[:, :num_scale_bytes].contiguous().view(torch.float32).to(dtype)
        numbers = packed[:, num_scale_bytes:].contiguous().view(self._dtype).view(num_rows, num_blocks, self.block)
        return (numbers.to(dtype) * scale.unsqueeze(-1)).view(num_rows, -1)

    def num_bytes(self, numbers: int) -> int:
        """Return the bytes of the numbers and their scales."""
        return numbers // self.block * (_SCALE_BYTES + self.block * self._dtype.itemsize)


def _float16_scale(largest: Tensor) -> Tensor:
    """Return the power of two by which a block is divided exactly, so that its largest number fits in float16."""
    exponent = torch.where(torch.isfinite(largest), torch.frexp(largest).exponent, _FLOAT16_EXPONENT)
    exponent = (exponent - _FLOAT16_EXPONENT).clamp_(_MIN_EXPONENT, _MAX_EXPONENT)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent)


def _int8_scale(largest: Tensor) -> Tensor:
    """Return the scale by which a block is divided, so that its largest number becomes 127."""
    scale = torch.empty_like(largest, dtype=torch.float32)
    return scale.copy_(largest / _INT8_MAX)  # copy_ also works while `verify` forbids casts of float64 to float32
