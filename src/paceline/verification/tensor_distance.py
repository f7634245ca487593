"""Norms and distances of tensors of any type, computed in double precision."""

import torch
from torch import Tensor


def to_double(value: Tensor) -> Tensor:
    """Return the tensor in double precision: complex values as two real parts, sparse tensors as dense."""
    value = value.detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.double()


def euclidean_norm(value: Tensor) -> float:
    """Return the Euclidean norm."""
    return float(to_double(value).norm())


def euclidean_distance(one: Tensor, other: Tensor) -> float:
    """Return the Euclidean norm of the difference. The difference of equal infinities, or of two NaNs, is 0."""
    left, right = to_double(one), to_double(other)
    difference = left - right
    if not bool(torch.isfinite(difference).all()):
        difference = difference.masked_fill((left == right) | (left.isnan() & right.isnan()), 0.0)
    return float(difference.norm())


def machine_epsilon(value: Tensor) -> float:
    """Return the machine epsilon of the tensor's type; 0 for integers."""
    return float(torch.finfo(value.dtype).eps) if value.is_floating_point() or value.is_complex() else 0.0
