"""Tensors on disk in the safetensors format, each with its digest; nothing is pickled and nothing is trusted.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the bytes).
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
_MOST_HEADER_BYTES = 100_000_000
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class TensorBytes:
    """A tensor as bytes, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.data.nbytes != math.prod(self.shape) * ITEM_BYTES[self.dtype]:
            raise ValueError(f"{self.name}: {self.data.nbytes} bytes for {self.dtype}{list(self.shape)}")


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """What a manifest says of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "TensorEntry":
        """From a manifest; checks that sizes belong together."""
        entry = TensorEntry(
            name=str(value["name"]),
            dtype=str(value["dtype"]),
            shape=tuple(int(n) for n in value["shape"]),
            start=int(value["start"]),
            stop=int(value["stop"]),
            digest=str(value["digest"]),
        )
        expected = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if min(entry.shape, default=0) < 0 or entry.start < 0 or entry.stop - entry.start != expected:
            raise ValueError(f"{entry.name}: sizes do not belong together")
        return entry


def digest(data: bytes | memoryview) -> str:
    """SHA-256, which processors compute in hardware."""
    return hashlib.sha256(data).hexdigest()


def write_tensors(path: Path, tensors: Sequence[TensorBytes]) -> list[TensorEntry]:
    """Write one safetensors file and flush it to disk; digests are computed beside the writing."""
    entries, header = _plan(tensors)
    with ThreadPoolExecutor(max_workers=2) as pool, path.open("xb") as file:
        digests = [pool.submit(digest, tensor.data) for tensor in tensors]
        file.write(header)
        for tensor in tensors:
            file.write(tensor.data)
        file.flush()
        os.fsync(file.fileno())
        return [
            TensorEntry(**{**asdict(entry), "digest": found.result()})
            for entry, found in zip(entries, digests, strict=True)
        ]


def read_tensors(path: Path, entries: Sequence[TensorEntry]) -> Iterator[TensorBytes]:
    """Read tensors and compare each with its digest.

    Raises:
        CheckpointError: the file is missing, short, or a tensor's bytes are not those that were written.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            for entry in entries:
                if entry.stop > size:
                    raise CheckpointError(f"{path.name} is cut off: {entry.name} ends beyond it.", where=str(path))
                data = bytearray(entry.stop - entry.start)
                file.seek(entry.start)
                if file.readinto(data) != len(data) or digest(memoryview(data)) != entry.digest:
                    raise CheckpointError(
                        f"{entry.name} in {path.name} is not what was written.",
                        where=str(path),
                        cause="a damaged disk, a flipped bit, or an edited file",
                    )
                yield TensorBytes(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=memoryview(data))
    except OSError as error:
        raise CheckpointError(f"{path.name} can't be read: {error.strerror}.", where=str(path)) from error


def header_digest(path: Path) -> str:
    """The digest of everything in front of the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES or length > path.stat().st_size:
            raise CheckpointError(f"{path.name} has a header of {length} bytes.", where=str(path))
        return digest(length.to_bytes(8, "little") + file.read(length))


def _plan(tensors: Sequence[TensorBytes]) -> tuple[list[TensorEntry], bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    spans = []
    for tensor in tensors:
        stop = offset + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        spans.append((offset, stop))
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    base = len(text) + 8
    entries = [
        TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape, start=base + span[0], stop=base + span[1], digest="")
        for t, span in zip(tensors, spans, strict=True)
    ]
    return entries, len(text).to_bytes(8, "little") + text
