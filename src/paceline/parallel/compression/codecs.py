"""Codecs that pack numbers into bytes. Each row of the packed tensor is sent to one rank."""

from typing import Protocol

import torch
from torch import Tensor

_SCALE_BYTES = 4
_HALF_TOP = 15
_INT8_TOP = 127.0
_LEAST, _MOST = -126, 127  # range of exponents with full precision in float32


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
    """A codec with float16 or int8 numbers and one float32 scale per block.

    If a block's scale is not finite, none of its numbers is finite after unpacking.
    """

    def __init__(self, *, block: int, is_float: bool) -> None:
        self.block = block
        self._is_float = is_float
        self._type = torch.float16 if is_float else torch.int8

    def pack(self, values: Tensor) -> Tensor:
        """Pack the scales of a row, followed by its numbers."""
        blocks = values.view(len(values), -1, self.block)
        scale = (_power_of_two if self._is_float else _step)(blocks.abs().amax(-1))
        by = torch.where(torch.isfinite(scale) & (scale > 0.0), scale, 1.0).to(values.dtype)
        small = blocks / by.unsqueeze(-1)
        if not self._is_float:
            small = small.nan_to_num_(nan=0.0).clamp_(-_INT8_TOP, _INT8_TOP).round_()
        numbers = small.to(self._type).view(len(values), -1).view(torch.uint8)
        return torch.cat([scale.view(torch.uint8), numbers], dim=1)

    def unpack(self, packed: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply each number by the scale of its block."""
        rows = len(packed)
        blocks = packed.shape[1] // (_SCALE_BYTES + self.block * self._type.itemsize)
        at = _SCALE_BYTES * blocks
        scale = packed[:, :at].contiguous().view(torch.float32).to(dtype)
        numbers = packed[:, at:].contiguous().view(self._type).view(rows, blocks, self.block).to(dtype)
        return (numbers * scale.unsqueeze(-1)).view(rows, -1)

    def num_bytes(self, numbers: int) -> int:
        """Return the bytes of the numbers and their scales."""
        return numbers // self.block * (_SCALE_BYTES + self.block * self._type.itemsize)


def _power_of_two(largest: Tensor) -> Tensor:
    """Return the power of two by which a block is divided exactly, so that its largest number fits in float16."""
    exponent = torch.where(torch.isfinite(largest), torch.frexp(largest).exponent, _HALF_TOP)
    exponent = (exponent - _HALF_TOP).clamp_(_LEAST, _MOST)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent)


def _step(largest: Tensor) -> Tensor:
    """Return the scale by which a block is divided, so that its largest number becomes 127."""
    found = torch.empty_like(largest, dtype=torch.float32)
    return found.copy_(largest / _INT8_TOP)  # copy_ also works while `verify` forbids casts of float64 to float32
