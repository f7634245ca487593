"""Tensors on disk in the safetensors format, each with its digest; nothing is pickled, and every size is checked.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the bytes).
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from paceline.errors import CheckpointError, MachineError
from paceline.filesystem.atomic_files import is_damage, open_regular

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64  # the size of a header, in bytes, is a multiple of this
_MAX_INLINE_DIGEST_BYTES = 1 << 16  # a larger tensor's digest is computed in another thread
_BLOCK_BYTES = 16 << 20  # how much of a tensor is read at a time to check its digest

Shape = tuple[int, ...]
_Size = Annotated[int, Meta(ge=0, le=1 << 62)]
_Sizes = Annotated[tuple[_Size, ...], Meta(max_length=64)]  # torch has no tensor of more dimensions


class _EntrySchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The manifest's entry for one tensor, as it is written: `at` and `whole` may be absent but not `null`."""

    name: str
    dtype: str
    shape: _Sizes
    start: _Size
    stop: _Size
    digest: str
    at: _Sizes | msgspec.UnsetType = msgspec.UNSET
    whole: _Sizes | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """The type and shape of a tensor, or of the shard at offset `at` of a tensor of shape `whole`."""

    name: str
    dtype: str
    shape: Shape
    at: Shape | None = None
    whole: Shape | None = None

    @property
    def key(self) -> str:
        """The tensor's name in its file; a shard's name has its offset, so that it differs from the full tensor's."""
        return self.name if self.at is None else f"{self.name}@{'.'.join(map(str, self.at))}"

    @property
    def num_bytes(self) -> int:
        """The size of the elements in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def layout_fields(self) -> dict[str, Any]:
        """Return these fields as keyword arguments for another class."""
        return {"name": self.name, "dtype": self.dtype, "shape": self.shape, "at": self.at, "whole": self.whole}


@dataclass(frozen=True, kw_only=True)
class TensorBytes(TensorLayout):
    """A tensor as bytes, row-major."""

    data: memoryview

    def __post_init__(self) -> None:
        if self.data.nbytes != self.num_bytes:
            raise ValueError(f"{self.name}: {self.data.nbytes} bytes for {self.dtype}{list(self.shape)}")

    def copy_into(self, target: memoryview) -> None:
        """Copy the bytes into memory of this size."""
        target[:] = self.data


@dataclass(frozen=True, kw_only=True)
class LazyTensor(TensorLayout):
    """A tensor whose bytes are created when they are written, and released afterwards."""

    load_data: Callable[[], memoryview]
    copy_data: Callable[[memoryview], None] | None = None
    """A function that copies the bytes into memory of this size, from a GPU without a copy in between."""

    @property
    def data(self) -> memoryview:
        """The tensor's bytes, created on access."""
        return self.load_data()

    def copy_into(self, target: memoryview) -> None:
        """Copy the bytes into memory of this size."""
        if self.copy_data is None:
            target[:] = self.load_data()
        else:
            self.copy_data(target)


Writable = TensorBytes | LazyTensor


@dataclass(frozen=True, kw_only=True)
class TensorEntry(TensorLayout):
    """The manifest's entry for one tensor or shard, with the range of its bytes in the file."""

    start: int
    stop: int
    digest: str

    def as_json(self) -> dict[str, Any]:
        """Return the entry as a dict for the manifest."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "TensorEntry":
        """Return the entry that a manifest's dict describes, after checking types and sizes.

        Raises:
            ValueError: a type or size is wrong; the message names the tensor.
        """
        schema = msgspec.convert(value, _EntrySchema)
        if schema.dtype not in ITEM_BYTES:
            raise ValueError(f"{schema.name}: unknown dtype {schema.dtype!r}")
        entry = TensorEntry(
            name=schema.name, dtype=schema.dtype, shape=schema.shape, start=schema.start, stop=schema.stop,
            digest=schema.digest,
            at=None if schema.at is msgspec.UNSET else schema.at,
            whole=None if schema.whole is msgspec.UNSET else schema.whole,
        )  # fmt: skip
        if entry.stop - entry.start != entry.num_bytes:
            raise ValueError(f"{entry.name}: inconsistent sizes")
        if len({len(dims) for dims in (entry.shape, entry.at, entry.whole) if dims is not None}) > 1:
            raise ValueError(f"{entry.name}: a shard has a different number of dimensions")
        return entry


def sha256_digest(data: bytes | memoryview) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def write_tensors(path: Path, tensors: Sequence[Writable]) -> list[TensorEntry]:
    """Write one safetensors file and flush it to disk; each tensor's digest is computed while it is written.

    Only one lazy tensor at a time is in memory.
    """
    entries, header = plan_layout(tensors)
    with ThreadPoolExecutor(max_workers=1) as pool, path.open("xb") as file:
        file.write(header)
        entries = [
            replace(entry, digest=_write_and_digest(file, tensor.data, pool))
            for entry, tensor in zip(entries, tensors, strict=True)
        ]
        file.flush()
        os.fsync(file.fileno())
        return entries


def _write_and_digest(file: BinaryIO, data: memoryview, pool: ThreadPoolExecutor) -> str:
    if data.nbytes < _MAX_INLINE_DIGEST_BYTES:
        file.write(data)
        return sha256_digest(data)
    future = pool.submit(sha256_digest, data)
    file.write(data)
    return future.result()


def read_tensors(path: Path, entries: Sequence[TensorEntry]) -> Iterator[TensorBytes]:
    """Yield tensors after comparing each with its digest.

    Raises:
        CheckpointError: the file is missing or truncated, or a tensor's bytes do not match their digest.
        MachineError: the file can't be read now.
    """
    with _open_tensors(path) as file:
        for entry in entries:
            _check_end(file, entry)
            data = _allocate(entry)
            file.seek(entry.start)
            if file.readinto(data) != len(data) or sha256_digest(data) != entry.digest:
                raise _digest_mismatch_error(path, entry)
            yield TensorBytes(**entry.layout_fields(), data=data)


def check_tensors(path: Path, entries: Sequence[TensorEntry]) -> None:
    """Compare each tensor with its digest; at most one block of a tensor is in memory at a time.

    Raises:
        CheckpointError: the file is missing or truncated, or a tensor's bytes do not match their digest.
        MachineError: the file can't be read now.
    """
    with _open_tensors(path) as file:
        for entry in entries:
            _check_end(file, entry)
            file.seek(entry.start)
            hasher, remaining = hashlib.sha256(), entry.stop - entry.start
            while remaining and (block := file.read(min(remaining, _BLOCK_BYTES))):
                hasher.update(block)
                remaining -= len(block)
            if remaining or hasher.hexdigest() != entry.digest:
                raise _digest_mismatch_error(path, entry)


@contextmanager
def _open_tensors(path: Path) -> Iterator[BufferedReader]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            yield file
    except OSError as error:
        message = f"{path.name} can't be read: {error.strerror}."
        raise (CheckpointError if is_damage(error) else MachineError)(message, where=str(path)) from error
    except ValueError as error:
        raise CheckpointError(f"{path.name} can't be read: {error}.", where=str(path)) from error


def _check_end(file: BufferedReader, entry: TensorEntry) -> None:
    if entry.stop > os.fstat(file.fileno()).st_size:
        name = Path(file.name).name
        raise CheckpointError(
            f"{name} is truncated: {entry.key} needs bytes after the end of the file.", where=str(file.name)
        )


def _allocate(entry: TensorEntry) -> memoryview:
    try:
        return memoryview(bytearray(entry.stop - entry.start))
    except MemoryError:
        size = entry.stop - entry.start
        raise MachineError(f"{entry.key} needs {size:,} bytes of memory at once, and the allocation failed.") from None


def _digest_mismatch_error(path: Path, entry: TensorEntry) -> CheckpointError:
    return CheckpointError(
        f"{entry.key} in {path.name} differs from what was written.",
        where=str(path),
        cause="a damaged disk, a flipped bit, or an edited file",
    )


def header_digest(path: Path) -> tuple[int, str]:
    """Return the size of a file, and the digest of its header, which is everything before the tensors.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is not regular.
        CheckpointError: the file is shorter than its header should be.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES or length > size:
            raise CheckpointError(
                f"{path.name} is truncated or damaged: it has {size} bytes, but its header should have {length}.",
                where=str(path),
                cause="an interrupted copy, a full disk, or a file of another format",
            )
        return size, sha256_digest(length.to_bytes(8, "little") + file.read(length))


def plan_layout(tensors: Sequence[Writable]) -> tuple[list[TensorEntry], bytes]:
    """Return the entries of a file's tensors, without digests, and the file's header.

    Raises:
        CheckpointError: two tensors have the same name.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        if tensor.key in header:
            raise CheckpointError(f"two tensors are called {tensor.key}.", hint="rename one of the parameters")
        stop = offset + tensor.num_bytes
        header[tensor.key] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    base = len(text) + 8
    offsets = [[base + offset for offset in header[tensor.key]["data_offsets"]] for tensor in tensors]
    entries = [
        TensorEntry(**tensor.layout_fields(), start=start, stop=stop, digest="")
        for tensor, (start, stop) in zip(tensors, offsets, strict=True)
    ]
    return entries, len(text).to_bytes(8, "little") + text
