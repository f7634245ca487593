"""Tensors that show other numbers than they have in memory: expanded ones, and those that torch keeps distributed."""

import torch
from torch import Tensor


def copy_into(target: Tensor, value: Tensor, *, non_blocking: bool = False) -> None:
    """Copy `value` over `target`; of an expanded axis the first place is everybody's."""
    for axis, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, value = target.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
    target.copy_(value, non_blocking=non_blocking)


def equal_tensors(old: Tensor, new: Tensor) -> bool:
    """Equal in every element, where NaN is NaN."""
    return bool(((old == new) | ((old != old) & (new != new))).all())


def local_elements(tensor: Tensor) -> Tensor:
    """This rank's elements of a tensor that torch keeps distributed; any other is itself."""
    to_local = getattr(tensor, "to_local", None)
    found: Tensor = tensor if to_local is None else to_local()
    return found


def bits_checksum(tensor: Tensor) -> Tensor:
    """A sum of the raw bits modulo 2^64: equal for equal bits, cheap, in the tensor's own memory."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = flat[:whole].view(torch.int64).sum() if whole else torch.zeros((), dtype=torch.int64, device=tensor.device)
    return total + flat[whole:].to(torch.int64).sum()
