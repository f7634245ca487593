"""Conversion of tensors to bytes and back, bit for bit."""

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
    """Return the tensor's bytes on the CPU. A contiguous tensor that is on the CPU already is not copied."""
    return TensorBytes(
        name=name, dtype=_dtype_name(name, tensor.dtype), shape=tuple(tensor.shape), data=_tensor_data(tensor)
    )


def lazy_tensor(
    name: str,
    *,
    dtype: torch.dtype,
    shape: Shape,
    get_tensor: Callable[[], Tensor],
    at: Shape | None = None,
    whole: Shape | None = None,
) -> LazyTensor:
    """Return a tensor, or the shard at offset `at`, whose bytes are taken from `get_tensor` when they are written."""
    return LazyTensor(
        name=name,
        dtype=_dtype_name(name, dtype),
        shape=shape,
        load_data=lambda: _tensor_data(get_tensor()),
        copy_data=lambda target: _copy_tensor(get_tensor(), target),
        at=at,
        whole=whole,
    )


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} has the type {dtype}, which can't be saved.")
    return _NAMES[dtype]


def _tensor_data(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


def _copy_tensor(tensor: Tensor, target: memoryview) -> None:
    """Copy a tensor's bytes into memory of its size."""
    if target.nbytes:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel() != target.nbytes:
            raise ValueError(f"{flat.numel()} bytes for {target.nbytes} bytes of memory")
        torch.frombuffer(target, dtype=torch.uint8).copy_(flat)


def from_bytes(value: TensorBytes) -> Tensor:
    """Return a tensor with these bytes."""
    if not value.data.nbytes:
        return torch.empty(value.shape, dtype=DTYPES[value.dtype])
    aligned = torch.empty(value.data.nbytes, dtype=torch.uint8)
    aligned.copy_(torch.frombuffer(bytearray(value.data) if value.data.readonly else value.data, dtype=torch.uint8))
    return aligned.view(DTYPES[value.dtype]).reshape(value.shape)


def deduplicate_storages(tensors: Mapping[str, Tensor]) -> tuple[list[Writable], dict[str, str]]:
    """Return each tensor once, under its first name, and a map from the other names of tied tensors to the first."""
    first_names: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    writable: list[Writable] = []
    for name, tensor in tensors.items():
        storage_key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if tensor.numel() and storage_key in first_names:
            aliases[name] = first_names[storage_key]
            continue
        first_names[storage_key] = name
        writable.append(
            lazy_tensor(name, dtype=tensor.dtype, shape=tuple(tensor.shape), get_tensor=partial(Tensor.detach, tensor))
        )
    return writable, aliases


class WeightsDigest:
    """A digest of tensors, which are added in sorted order of their names. Equal digests mean equal bits."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self._last_name = ""

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor, which may be freed afterwards."""
        assert name >= self._last_name
        value = to_bytes(name, tensor)
        self._hasher.update(f"{name} {value.dtype} {value.shape}".encode())
        self._hasher.update(value.data)
        self._last_name = name

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal."""
        return self._hasher.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of tensors that come in sorted order of their names."""
    digest = WeightsDigest()
    for name, tensor in tensors:
        digest.add(name, tensor)
    return digest.hexdigest()


def describe_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return type and shape as text, for comparing models."""
    return f"{str(dtype)[6:]}{list(shape)}"
