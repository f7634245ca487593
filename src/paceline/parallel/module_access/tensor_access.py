"""Copy, compare and checksum tensors, including expanded tensors and DTensors."""

import torch
from torch import Tensor


def copy_into(target: Tensor, value: Tensor, *, non_blocking: bool = False) -> None:
    """Copy `value` into `target`; in an expanded dimension only index 0 is written, since all indices share memory."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value, non_blocking=non_blocking)


def equal_tensors(old: Tensor, new: Tensor) -> bool:
    """Return whether all elements are equal; NaN equals NaN."""
    return bool(((old == new) | ((old != old) & (new != new))).all())


def local_elements(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; return any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    local_tensor: Tensor = tensor if to_local is None else to_local()
    return local_tensor


def bits_checksum(tensor: Tensor) -> Tensor:
    """Return a cheap checksum on the tensor's device: the sum of its raw bits, in words of 64 bits, modulo 2^64."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    num_word_bytes = flat.numel() // 8 * 8
    total = (
        flat[:num_word_bytes].view(torch.int64).sum()
        if num_word_bytes
        else torch.zeros((), dtype=torch.int64, device=tensor.device)
    )
    return total + flat[num_word_bytes:].to(torch.int64).sum()
