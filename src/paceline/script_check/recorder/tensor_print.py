"""Summaries of tensors on their own device: random projections, norm and digest, without a copy of the tensor."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.script_check.recording import TensorPrint
from paceline.verification.fingerprints.fingerprint import NUM_PROJECTIONS, max_rounding, projection_signs

_BLOCK = 4096
_CHUNK = 256 * _BLOCK  # elements that are converted to float64 at a time
_SIZES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # of splitmix64, as signed numbers
MAX_EPS = 2.0**-7  # of bfloat16


def mix_bits(value: Tensor) -> Tensor:
    """Return well mixed 64-bit integers: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = (value ^ _shifted(value, shift)) * multiplier
    return value ^ _shifted(value, 31)


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of each element as a 64-bit integer, in one dimension."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_SIZES[flat.element_size()]).long()


def print_tensor(tensor: Tensor, *, scale: float = 1.0, eps: float = 0.0) -> TensorPrint:
    """Return the summary of a tensor times `scale`, or of this rank's part of a sharded tensor.

    With `eps`, the machine epsilon of the type in which it was computed, elements that may be rounding are counted.
    """
    local, part, shape = _local_part(tensor.detach())
    flat = local.contiguous().reshape(-1)
    starts = None if part is None else _positions(part, shape, device=flat.device)
    square, largest, digest = 0.0, 0.0, 0
    projections = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        end = start + chunk.numel()
        places = torch.arange(start, end, device=flat.device) if starts is None else starts[start:end]
        values = chunk.double() * scale
        square += float(values.square().sum())
        largest = max(largest, float(values.abs().max()))
        digest += int(mix_bits(bits_of(chunk) * 5 + mix_bits(places + 1)).sum())
        projections += _project_chunk(values, start) if starts is None else _project_places(values, places)
    numel = local.numel() if shape is None else int(torch.Size(shape).numel())
    return TensorPrint(
        numel=numel,
        norm=square**0.5,
        largest=largest,
        projections=tuple(projections.tolist()),
        digest=digest % (1 << 64),
        part=part,
        faint_share=_num_faint(flat, largest / (scale or 1.0), eps) / max(numel, 1) if eps else 0.0,
    )


def _num_faint(flat: Tensor, largest: float, eps: float) -> int:
    """Return how many elements are not zero, and small enough to be rounding of the others."""
    limit, count = max_rounding(eps) * abs(largest), 0
    for start in range(0, flat.numel(), _CHUNK):
        magnitudes = flat[start : start + _CHUNK].abs()
        count += int(((magnitudes <= limit) & (magnitudes > 0)).sum())
    return count


def project_tensor(tensor: Tensor) -> tuple[float, ...]:
    """Return only the projections of a whole tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    total = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        total += _project_chunk(flat[start : start + _CHUNK].double(), start)
    return tuple(total.tolist())


def rounding_of(dtype: torch.dtype) -> float:
    """Return the machine epsilon of a type, and 0 for integers."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _shifted(value: Tensor, count: int) -> Tensor:
    """Return the value shifted to the right as an unsigned number."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _local_part(tensor: Any) -> tuple[Tensor, tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]:
    """Return the tensor on this rank, its start and length in each dimension, and the shape of the whole tensor."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if not hasattr(tensor, "placements"):
        return tensor, None, None
    shape = tuple(tensor.shape)
    part = [(0, size) for size in shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            start, size = part[placement.dim]
            length = -(-size // tensor.device_mesh.size(axis))
            first = min(tensor.device_mesh.get_local_rank(axis) * length, size)
            part[placement.dim] = (start + first, min(length, size - first))
    return tensor.to_local(), tuple(part), shape


def _positions(part: tuple[tuple[int, int], ...], shape: Any, *, device: torch.device) -> Tensor:
    """Return the position of each element of the part in the whole, flattened tensor."""
    positions = torch.zeros((), dtype=torch.int64, device=device)
    for (start, length), size in zip(part, shape, strict=True):
        positions = positions.unsqueeze(-1) * size + torch.arange(start, start + length, device=device)
    return positions.reshape(-1)


@cache
def _position_signs(device: torch.device) -> Tensor:
    return torch.from_numpy(projection_signs(0)[0]).to(device)


@cache
def _block_signs(count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(projection_signs(count * _BLOCK)[1]).to(device)


def _num_blocks(end: int) -> int:
    """Return a number of blocks that holds `end` elements, out of few numbers, because the signs are cached."""
    return 1 << max(0, (-(-end // _BLOCK) - 1).bit_length())


def _project_chunk(values: Tensor, start: int) -> Tensor:
    """Return the projections of values that begin at `start`, a multiple of the block size."""
    blocks, first = -(-values.numel() // _BLOCK), start // _BLOCK
    padded = values.new_zeros(blocks * _BLOCK)
    padded[: values.numel()] = values
    signs = _block_signs(_num_blocks((first + blocks) * _BLOCK), values.device)[first : first + blocks]
    return (padded.view(blocks, _BLOCK) @ _position_signs(values.device) * signs).sum(dim=0)


def _project_places(values: Tensor, places: Tensor) -> Tensor:
    """Return the projections of values at any places."""
    if not values.numel():
        return values.new_zeros(NUM_PROJECTIONS)
    signs = _block_signs(_num_blocks(int(places.max()) + 1), values.device)
    return values @ (_position_signs(values.device)[places % _BLOCK] * signs[places // _BLOCK])
