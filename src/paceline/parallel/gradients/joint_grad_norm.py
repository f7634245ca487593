"""Compute the norm of a gradient that is sharded over several ranks.

Each element of the full gradient is counted by one rank. By default, the squares are summed in float64. For a float32
tensor on the CPU, that would be slow. There the flattened tensor is divided into rows of 4096 elements. The norm of
each row is computed in float32, and the squares of these norms are summed in float64. The error of this method is
smaller than the rounding of a float32. A single float32 sum over millions of elements would have an error in the fourth
digit. Exact mode sums integers, so the bits are equal for any sharding.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World

LIMB_BITS = 28
_CHUNK = 1 << 16
_ROW = 4096  # elements
_TINY = 1e-30  # in a smaller sum of squares, float32 squares may have underflowed


def joint_norm(owned_tensors: Sequence[Tensor], *, worlds: Sequence[World], exact: bool = False) -> Tensor:
    """Return the Euclidean norm over all ranks: a float64 scalar, equal on every rank.

    `owned_tensors` are the tensors that this rank counts; if several ranks hold a tensor, one of them owns it. The
    tensors are distributed over the ranks of `worlds`. The norm is not finite if an element is not.
    """
    device = next((world.device for world in worlds), owned_tensors[0].device if owned_tensors else torch.device("cpu"))
    tensors = [tensor.detach() for tensor in owned_tensors if tensor.numel()]
    return _integer_norm(tensors, worlds, device) if exact else _float_norm(tensors, worlds, device)


def _float_norm(tensors: Sequence[Tensor], worlds: Sequence[World], device: torch.device) -> Tensor:
    """Return the norm; if squares may have overflowed or underflowed, divide by the largest magnitude first."""
    total = _joint_sum_of_squares(tensors, worlds, device)
    if device.type != "cpu" or _TINY < total.item() < math.inf:
        return total.sqrt()  # the value is not checked on a GPU, because that would synchronize
    largest = _joint_max_magnitude(tensors, worlds, device)
    if largest == 0.0 or not math.isfinite(largest):
        return total.sqrt()
    scaled = [tensor.double() / largest for tensor in tensors]
    return _joint_sum_of_squares(scaled, worlds, device).sqrt() * largest


def _joint_sum_of_squares(tensors: Sequence[Tensor], worlds: Sequence[World], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += _sum_of_squares(tensor).to(device)
    for world in worlds:
        world.all_reduce(total)
    return total


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares in float64; a float32 tensor on the CPU is summed by rows."""
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        square: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        return square
    flat = tensor.reshape(-1)
    num_row_elements = flat.numel() - flat.numel() % _ROW
    total: Tensor = torch.linalg.vector_norm(flat[num_row_elements:]).double().square()
    if num_row_elements:
        total += torch.linalg.vector_norm(flat[:num_row_elements].view(-1, _ROW), dim=1).double().square().sum()
    return total


def _joint_max_magnitude(tensors: Sequence[Tensor], worlds: Sequence[World], device: torch.device) -> float:
    """Return the largest magnitude over all ranks; NaN counts as infinite, because MAX over ranks would drop it."""
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        low, high = torch.aminmax(tensor)
        magnitude = torch.maximum(-low, high).double().nan_to_num(nan=math.inf, posinf=math.inf).to(device)
        largest = torch.maximum(largest, magnitude)
    for world in worlds:
        world.all_reduce(largest, op="max")
    return float(largest.item())


def _integer_norm(tensors: Sequence[Tensor], worlds: Sequence[World], device: torch.device) -> Tensor:
    """Return the norm. Each square, rounded to 2^-56 of the largest, is split into two 28-bit integers for the sums.

    This is valid for up to 2^34 elements: then the sum of the higher integers is below 2^63.
    """
    largest = _joint_max_magnitude(tensors, worlds, device)
    if largest == 0.0 or not math.isfinite(largest):
        return torch.tensor(largest if largest == 0.0 else math.nan, dtype=torch.float64, device=device)
    exponent = math.frexp(largest)[1]
    limbs = torch.zeros(2, dtype=torch.int64, device=device)
    for tensor in tensors:
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            limbs += _limbs(flat[start : start + _CHUNK].to(torch.float64, copy=True), exponent).to(device)
    for world in worlds:
        world.all_reduce(limbs)
    high, low = limbs.tolist()
    total = (int(high) << LIMB_BITS) + int(low)
    return torch.tensor(_scaled_sqrt(total, exponent), dtype=torch.float64, device=device)


def _limbs(values: Tensor, exponent: int) -> Tensor:
    """Return the two integer sums of squares of values below 2^exponent. A float32's square is exact in float64."""
    half = exponent // 2  # in two steps: 2^-exponent alone may overflow
    unit = values.mul_(2.0**-half).mul_(2.0 ** -(exponent - half)).square_().mul_(float(1 << LIMB_BITS))
    high = unit.floor()
    low = unit.sub_(high).mul_(float(1 << LIMB_BITS)).round_()
    return torch.stack([high.to(torch.int64).sum(), low.to(torch.int64).sum()])


def _scaled_sqrt(total: int, exponent: int) -> float:
    """Return the square root of total * 2^-56, times 2^exponent; infinity if a float64 can't hold it."""
    try:
        return math.ldexp(math.sqrt(total), exponent - LIMB_BITS)
    except OverflowError:
        return math.inf
