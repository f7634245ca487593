"""Fixed-point sums: floats rounded to multiples of 2^k and added as int64, by plain torch operations."""

import math
import struct

import torch
from torch import Tensor

_CHUNK = 1 << 16


def add_rounded_gradient(gradient: Tensor, *, sums: Tensor, exponent: int, is_first: bool, scratch: Tensor) -> None:
    """Round to multiples of 2^exponent and add to the int64 sums, in chunks that fit in the cache.

    With `is_first`, for the step's first gradient, overwrite the sums.
    """
    constant = rounding_constant(exponent)
    offset = float_bits(constant)
    for start in range(0, gradient.numel(), _CHUNK):
        chunk, target = gradient[start : start + _CHUNK], sums[start : start + _CHUNK]
        rounded = target.view(torch.float64) if is_first else scratch[: chunk.numel()]
        rounded.copy_(chunk)
        rounded.add_(constant)
        if is_first:
            target.sub_(offset)
        else:
            target.add_(rounded.view(torch.int64).sub_(offset))


def write_scaled_sums(
    sums: Tensor, *, out: Tensor, exponent: int, divisor: float | Tensor | None, scratch: Tensor
) -> None:
    """Write `sums` times 2^exponent, divided by `divisor`, to `out` in its dtype, in chunks that fit in the cache."""
    flat, unit = out.view(-1), 2.0**exponent
    for start in range(0, flat.numel(), _CHUNK):
        value = scratch[: flat[start : start + _CHUNK].numel()]
        value.copy_(sums[start : start + _CHUNK]).mul_(unit)
        if divisor is not None:
            value.div_(divisor)
        flat[start : start + _CHUNK].copy_(value)


def make_scratch_buffer(device: torch.device) -> Tensor:
    """Return a scratch buffer for one chunk."""
    return torch.empty(_CHUNK, dtype=torch.float64, device=device)


def rounding_constant(exponent: int) -> float:
    """Return the constant whose addition rounds a float64 to multiples of 2^exponent."""
    return math.ldexp(1.5, 52 + exponent)


def float_bits(value: float) -> int:
    """Return the bits of a float64 as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
