"""Tensors to bytes and back, bit for bit."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.store.tensors import TensorBytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def to_bytes(name: str, tensor: Tensor) -> TensorBytes:
    """The tensor's bytes on the CPU, without a copy where it is there already."""
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"{name} has the type {tensor.dtype}, which can't be saved.")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = _view(flat) if flat.numel() else memoryview(b"")
    return TensorBytes(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def _view(flat: Tensor) -> memoryview:
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def from_bytes(value: TensorBytes) -> Tensor:
    """A tensor with these bytes."""
    if not value.data.nbytes:
        return torch.empty(value.shape, dtype=DTYPES[value.dtype])
    aligned = torch.empty(value.data.nbytes, dtype=torch.uint8)
    aligned.copy_(torch.frombuffer(bytearray(value.data), dtype=torch.uint8))
    return aligned.view(DTYPES[value.dtype]).reshape(value.shape)


def once(tensors: Mapping[str, Tensor]) -> tuple[list[TensorBytes], dict[str, str]]:
    """Each storage once, under its first name, and the other names of tied tensors."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    kept: list[TensorBytes] = []
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and place in first:
            aliases[name] = first[place]
            continue
        first[place] = name
        kept.append(to_bytes(name, tensor))
    return kept, aliases


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """One digest of all values, by name; equal exactly when every bit is."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = to_bytes(name, tensors[name])
        total.update(f"{name} {value.dtype} {value.shape}".encode())
        total.update(value.data)
    return total.hexdigest()


def structure(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name to type and shape, for comparing models in words."""
    return {name: f"{str(t.dtype)[6:]}{list(t.shape)}" for name, t in tensors.items()}


def first_names(names: Sequence[str], *, most: int = 3) -> str:
    """A few names, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
