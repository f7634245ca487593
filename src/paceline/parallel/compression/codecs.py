"""How numbers become bytes: rows of them, each row a part that goes to one rank."""

from typing import Protocol

import torch
from torch import Tensor

_SCALE_BYTES = 4
_HALF_TOP = 15
_INT8_TOP = 127.0
_LEAST, _MOST = -126, 127  # exponents that float32 has at full precision


class Codec(Protocol):
    """Numbers as bytes and back. `block`: how many numbers stand or fall together; a row holds whole blocks."""

    block: int

    def pack(self, values: Tensor) -> Tensor:
        """`[rows, numbers]` as bytes, `[rows, bytes]`."""

    def unpack(self, packed: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The numbers again, as they were rounded."""

    def num_bytes(self, numbers: int) -> int:
        """Of a row of so many."""


class Bf16:
    """The upper half of a float32: 8 bits of precision, every exponent."""

    block = 1

    def pack(self, values: Tensor) -> Tensor:
        """Rounded to the nearest."""
        return values.to(torch.bfloat16).view(torch.uint8)

    def unpack(self, packed: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Exactly what was packed."""
        return packed.view(torch.bfloat16).to(dtype)

    def num_bytes(self, numbers: int) -> int:
        """Two each."""
        return 2 * numbers


class BlockScaledCodec:
    """Small numbers and a float32 for each block by which they are multiplied; where that is not finite, none is."""

    def __init__(self, *, block: int, is_float: bool) -> None:
        self.block = block
        self._is_float = is_float
        self._type = torch.float16 if is_float else torch.int8

    def pack(self, values: Tensor) -> Tensor:
        """The scales of a row first, then its numbers."""
        blocks = values.view(len(values), -1, self.block)
        scale = (_power_of_two if self._is_float else _step)(blocks.abs().amax(-1))
        by = torch.where(torch.isfinite(scale) & (scale > 0.0), scale, 1.0).to(values.dtype)
        small = blocks / by.unsqueeze(-1)
        if not self._is_float:
            small = small.nan_to_num_(nan=0.0).clamp_(-_INT8_TOP, _INT8_TOP).round_()
        numbers = small.to(self._type).view(len(values), -1).view(torch.uint8)
        return torch.cat([scale.view(torch.uint8), numbers], dim=1)

    def unpack(self, packed: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Each number times the scale of its block."""
        rows = len(packed)
        blocks = packed.shape[1] // (_SCALE_BYTES + self.block * self._type.itemsize)
        at = _SCALE_BYTES * blocks
        scale = packed[:, :at].contiguous().view(torch.float32).to(dtype)
        numbers = packed[:, at:].contiguous().view(self._type).view(rows, blocks, self.block).to(dtype)
        return (numbers * scale.unsqueeze(-1)).view(rows, -1)

    def num_bytes(self, numbers: int) -> int:
        """With the scales."""
        return numbers // self.block * (_SCALE_BYTES + self.block * self._type.itemsize)


def _power_of_two(largest: Tensor) -> Tensor:
    """So that the largest of a block stays just below what float16 can hold, and no bit is lost by scaling."""
    exponent = torch.where(torch.isfinite(largest), torch.frexp(largest).exponent, _HALF_TOP)
    exponent = (exponent - _HALF_TOP).clamp_(_LEAST, _MOST)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float32), exponent)


def _step(largest: Tensor) -> Tensor:
    """So that the largest of a block is 127 steps."""
    found = torch.empty_like(largest, dtype=torch.float32)
    return found.copy_(largest / _INT8_TOP)  # also while `verify` lets nothing cast float64 to float32
