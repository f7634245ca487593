"""Tensors to bytes and back, bit for bit."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.files.safetensors_io import LazyTensor, Shape, TensorBytes, Writable
from paceline.errors import CheckpointError

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
    """Return the tensor's bytes on the CPU, without a copy if it is there already."""
    return TensorBytes(name=name, dtype=_name(name, tensor.dtype), shape=tuple(tensor.shape), data=_data(tensor))


def lazy_tensor(
    name: str,
    *,
    dtype: torch.dtype,
    shape: Shape,
    find: Callable[[], Tensor],
    at: Shape | None = None,
    whole: Shape | None = None,
) -> LazyTensor:
    """Return a tensor, or the piece at offset `at`, whose bytes are taken from `find` when they are written."""
    return LazyTensor(name=name, dtype=_name(name, dtype), shape=shape, make=lambda: _data(find()), at=at, whole=whole)


def _name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} has the type {dtype}, which can't be saved.")
    return _NAMES[dtype]


def _data(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


def from_bytes(value: TensorBytes) -> Tensor:
    """Return a tensor with these bytes."""
    if not value.data.nbytes:
        return torch.empty(value.shape, dtype=DTYPES[value.dtype])
    aligned = torch.empty(value.data.nbytes, dtype=torch.uint8)
    aligned.copy_(torch.frombuffer(bytearray(value.data) if value.data.readonly else value.data, dtype=torch.uint8))
    return aligned.view(DTYPES[value.dtype]).reshape(value.shape)


def deduplicate_storages(tensors: Mapping[str, Tensor]) -> tuple[list[Writable], dict[str, str]]:
    """Return each storage once, under its first name, and the other names of tied tensors."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    kept: list[Writable] = []
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and place in first:
            aliases[name] = first[place]
            continue
        first[place] = name
        kept.append(
            lazy_tensor(name, dtype=tensor.dtype, shape=tuple(tensor.shape), find=partial(Tensor.detach, tensor))
        )
    return kept, aliases


class WeightsDigest:
    """A digest of all values, by name; equal exactly if every bit is. Names come in sorted order."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()
        self._last = ""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor, which may be freed afterwards."""
        assert name >= self._last
        value = to_bytes(name, tensor)
        self._total.update(f"{name} {value.dtype} {value.shape}".encode())
        self._total.update(value.data)
        self._last = name

    def text(self) -> str:
        """Return the digest in hexadecimal."""
        return self._total.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of tensors that come in sorted order of their names."""
    found = WeightsDigest()
    for name, tensor in tensors:
        found.add(name, tensor)
    return found.text()


def describe_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return type and shape as text, for comparing models."""
    return f"{str(dtype)[6:]}{list(shape)}"
