"""Summaries of tensors on their own device: random projections, norm and digest, without a copy of the tensor."""

from collections.abc import Iterator
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from paceline.script_check.recording import TensorPrint
from paceline.verification.fingerprints.fingerprint import NUM_PROJECTIONS, max_rounding, projection_signs

_BLOCK = 4096
_CPU_BLOCKS, _GPU_BLOCKS = 64, 1024  # that are summarized at a time
_NUM_SUMS = 1 + NUM_PROJECTIONS
_NARROW_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST, _LARGEST = 1e-15, 1e15  # magnitudes whose squares float32 can add
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # of splitmix64, as a signed number
_SIZES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # of splitmix64, as signed numbers
MAX_EPS = 2.0**-7  # of bfloat16
Place = tuple[tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]
"""The start and length of this rank's part in each dimension, None for all of it, and the shape of the whole tensor."""


def mix_bits(value: Tensor) -> Tensor:
    """Return well mixed 64-bit integers: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = (value ^ _shifted(value, shift)) * multiplier
    return value ^ _shifted(value, 31)


def _integers(flat: Tensor) -> Tensor:
    """Return the bits of each element as an integer of its size, in one dimension."""
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_SIZES[flat.element_size()])


def has_only_zeros(tensor: Tensor) -> bool:
    """Return whether a tensor of any layout has no element other than zero; one on the meta device may have some."""
    return not tensor.is_meta and not bool(_flat(tensor).any())


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bits of each element as a 64-bit integer, in one dimension."""
    return _integers(_flat(tensor)).long()


def _flat(tensor: Tensor) -> Tensor:
    """Return all elements in one dimension, dense, with the bits that they stand for."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)


def print_tensor(tensor: Tensor, *, scale: float = 1.0, eps: float = 0.0, place: Place = (None, None)) -> TensorPrint:
    """Return the summary of a tensor times `scale`, or of this rank's part of a sharded tensor.

    With `eps`, the machine epsilon of the type in which it was computed, elements that may be rounding are counted.
    `place` is where a plain tensor is in another one, of which this rank has only this part. A tensor on the meta
    device counts as zeros.
    """
    local, part, shape = _local_part(tensor.detach()) if place[0] is None else (tensor, *place)
    flat = _flat(local)
    if flat.is_meta:
        flat = torch.zeros(flat.shape, dtype=flat.dtype)
    first = 0 if part is None else _range_start(part, shape)
    places = None if first is not None else _positions(part or (), shape, device=flat.device)
    if flat.is_complex():
        flat, first = torch.view_as_real(flat).reshape(-1), None if first is None else 2 * first
        places = None if places is None else torch.stack([2 * places, 2 * places + 1], dim=1).reshape(-1)
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64, device=flat.device)
    largest, digest = sums.new_zeros(()), torch.zeros((), dtype=torch.int64, device=flat.device)
    factor_type = torch.int64 if flat.element_size() == 8 else torch.int32
    room = torch.empty(min(_chunk_size(flat), flat.numel() + 2 * _BLOCK), dtype=factor_type, device=flat.device)
    for start, chunk in _chunks(flat, first or 0):
        if places is None:
            square, top, projections = _sums(chunk, start)
            digest += _digest(chunk, start, room)
        else:
            values, own = chunk.double(), places[start : start + chunk.numel()]
            square, top, projections = values.square().sum(), values.abs().max(), _project_places(values, own)
            digest += _digest_places(chunk, own, room)
        sums += torch.cat([square.reshape(1), projections])
        largest = torch.maximum(largest, top)
    square_sum, *totals, top_value = torch.cat([sums, largest.reshape(1)]).tolist()
    numel = int(local.numel() if shape is None else torch.Size(shape).numel())
    return TensorPrint(
        numel=numel,
        norm=square_sum**0.5 * abs(scale),
        largest=top_value * abs(scale),
        projections=tuple(total * scale for total in totals),
        digest=int(digest) % (1 << 64),
        part=part,
        faint_share=_num_faint(flat, top_value, eps) / max(numel, 1) if eps else 0.0,
    )


def _num_faint(flat: Tensor, largest: float, eps: float) -> int:
    """Return how many elements are not zero, and small enough to be rounding of the others."""
    limit = max_rounding(eps) * largest
    count = torch.zeros((), dtype=torch.int64, device=flat.device)
    if isfinite(limit):
        for _, chunk in _chunks(flat, 0):
            count += chunk.count_nonzero() - (chunk.abs() > limit).count_nonzero()
    return int(count)


def project_tensor(tensor: Tensor) -> tuple[float, ...]:
    """Return only the projections of a whole tensor."""
    flat = _flat(tensor)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if flat.is_meta:
        return (0.0,) * NUM_PROJECTIONS
    total = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device=flat.device)
    for start, chunk in _chunks(flat, 0):
        total += _project(chunk, start)
    return tuple(total.tolist())


def rounding_of(dtype: torch.dtype) -> float:
    """Return the machine epsilon of a type, and 0 for integers."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def _shifted(value: Tensor, count: int) -> Tensor:
    """Return the value shifted to the right as an unsigned number."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _local_part(tensor: Any) -> tuple[Tensor, tuple[tuple[int, int], ...] | None, tuple[int, ...] | None]:
    """Return the tensor on this rank, its start and length in each dimension, and the shape of the whole tensor."""
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


def _range_start(part: tuple[tuple[int, int], ...], shape: Any) -> int | None:
    """Return the position of the first element of a part without gaps in the flattened tensor; None if it has gaps."""
    split = [axis for axis, ((_, length), size) in enumerate(zip(part, shape, strict=True)) if length != size]
    if not split:
        return 0
    row = int(torch.Size(shape[split[0] + 1 :]).numel())
    is_one_range = len(split) == 1 and all(size == 1 for size in shape[: split[0]])
    return part[split[0]][0] * row if is_one_range else None


def _chunk_size(flat: Tensor) -> int:
    """Return how many elements are summarized at a time: on a CPU, as many as its cache holds."""
    return (_CPU_BLOCKS if flat.device.type == "cpu" else _GPU_BLOCKS) * _BLOCK


def _chunks(flat: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks that end at the end of a block, with their position in the whole tensor, which begins at `first`."""
    size, done = _chunk_size(flat), 0
    while done < flat.numel():
        count = size - (first + done) % _BLOCK
        yield first + done, flat[done : done + count]
        done += count


def _has_exact_float32(values: Tensor) -> bool:
    """Return whether float64 would cost much, and products in float32 have all its digits."""
    is_worthwhile = values.dtype in _NARROW_TYPES and values.numel() > _BLOCK and values.device.type == "cpu"
    return is_worthwhile and torch.get_float32_matmul_precision() == "highest"


def _sums(chunk: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of squares, the largest magnitude and the projections, of the blocks in float64."""
    if _has_exact_float32(chunk):
        values = chunk.float()
        low, high = torch.aminmax(values)
        top = torch.maximum(-low, high).double()
        if _SMALLEST < float(top) < _LARGEST:
            return torch.dot(values, values).double(), top, _project(values, start)
    values = chunk.double()
    return values.square().sum(), values.abs().max(), _project_rows(values, start)


def _project(chunk: Tensor, start: int) -> Tensor:
    """Return the projections of a chunk: products in float32 within a block, and sums of the blocks in float64."""
    if _has_exact_float32(chunk):
        with torch.autocast(chunk.device.type, enabled=False):
            projections = _project_rows(chunk.float(), start)
        if bool(projections.isfinite().all()):
            return projections
    return _project_rows(chunk.double(), start)


def _project_rows(values: Tensor, start: int) -> Tensor:
    front, first = start % _BLOCK, start // _BLOCK
    position_signs = _position_signs(values.device, values.dtype)
    if front + values.numel() <= _BLOCK:
        sums = (values @ position_signs[front : front + values.numel()]).reshape(1, -1)
    else:
        sums = _rows(values, front) @ position_signs
    signs = _block_signs(_num_blocks((first + len(sums)) * _BLOCK), values.device)[first : first + len(sums)]
    return (sums.double() * signs).sum(dim=0)


def _rows(values: Tensor, front: int) -> Tensor:
    """Return values as rows of whole blocks; zeros fill the first `front` places, and those after the end."""
    count = -(-(front + values.numel()) // _BLOCK)
    if front == 0 and values.numel() == count * _BLOCK:
        return values.view(count, _BLOCK)
    padded = values.new_zeros(count * _BLOCK)
    padded[front : front + values.numel()] = values
    return padded.view(count, _BLOCK)


def _digest(chunk: Tensor, start: int, room: Tensor) -> Tensor:
    """Return the sum of the bits of each element times the factors of its place and of its block, modulo 2^64.

    The factors are odd, so that one changed element always changes the sum (multilinear hashing: Carter and Wegman,
    1979). `room` has the products, which wrap around in 32 bits unless the elements are larger.
    """
    front, first = start % _BLOCK, start // _BLOCK
    bits = _integers(chunk)
    place_factors = _factors(_BLOCK, chunk.device, room.dtype)
    if front + len(bits) <= _BLOCK:
        sums = (bits * place_factors[front : front + len(bits)]).sum(dtype=torch.int64).reshape(1)
    else:
        rows = _rows(bits, front)
        products = torch.mul(rows, place_factors, out=room[: rows.numel()].view(rows.shape))
        sums = products.sum(dim=1, dtype=torch.int64)
    factors = _factors(_num_rows(first + len(sums)), chunk.device, torch.int64)[first : first + len(sums)]
    return (sums * factors).sum()


def _digest_places(chunk: Tensor, places: Tensor, room: Tensor) -> Tensor:
    """Return the same sum for elements at any places."""
    if not len(places):
        return torch.zeros((), dtype=torch.int64, device=chunk.device)
    products = _integers(chunk) * _factors(_BLOCK, chunk.device, room.dtype)[places % _BLOCK]
    factors = _factors(_num_rows(int(places.max()) // _BLOCK + 1), chunk.device, torch.int64)
    return (products.long() * factors[places // _BLOCK]).sum()


@cache
def _factors(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return odd, well mixed numbers; the first ones are the same for any count."""
    return (mix_bits(torch.arange(1, count + 1, device="cpu") * _GOLDEN) | 1).to(device, dtype)


@cache
def _position_signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(projection_signs(0)[0]).to(device, dtype)


@cache
def _block_signs(count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(projection_signs(count * _BLOCK)[1]).to(device)


def _num_rows(end: int) -> int:
    """Return a number of rows from `end` on, out of few numbers, because what depends on it is cached."""
    return 1 << max(0, (end - 1).bit_length())


def _num_blocks(end: int) -> int:
    return _num_rows(-(-end // _BLOCK))


def _project_places(values: Tensor, places: Tensor) -> Tensor:
    """Return the projections of values at any places."""
    if not values.numel():
        return values.new_zeros(NUM_PROJECTIONS)
    signs = _block_signs(_num_blocks(int(places.max()) + 1), values.device)
    return values @ (_position_signs(values.device, values.dtype)[places % _BLOCK] * signs[places // _BLOCK])
