"""A safetensors file written tensor by tensor: what is in it is known before, the bytes come one after another."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.store.tensors import ITEM_BYTES

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A tensor before its bytes are there."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorFile:
    """Give the bytes with `add`, in the order of the headings; `close` flushes them to disk."""

    def __init__(self, path: Path, headings: Sequence[Heading]) -> None:
        self._rest = [heading.num_bytes for heading in headings]
        self._file = path.open("xb")
        self._file.write(_header(headings))

    def add(self, data: memoryview) -> None:
        """The next one's."""
        assert data.nbytes == self._rest.pop(0)
        self._file.write(data)

    def close(self) -> None:
        """Flush."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _header(headings: Sequence[Heading]) -> bytes:
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for heading in headings:
        stop = offset + heading.num_bytes
        found[heading.name] = {"dtype": heading.dtype, "shape": list(heading.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
