"""Checksums of samples, computed over their content.

The `repr` of an arbitrary object may contain a memory address, so it is used for simple types only.
"""

import zlib
from collections.abc import Mapping, Set
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from uuid import UUID

import numpy as np
import torch

_REPR_TYPES = (
    str, bytes, bytearray, bool, int, float, complex, type(None), range, slice, np.generic, np.dtype, torch.dtype,
    torch.device, date, time, timedelta, tzinfo, Decimal, Fraction, Enum, PurePath, UUID,
)  # fmt: skip
_QUALNAME_TYPES = (type, FunctionType, BuiltinFunctionType)
_MAX_DEPTH = 200  # of nested containers; deeper content does not enter the checksum


def checksum(sample: Any, start: int) -> int:
    """Return the CRC-32 of a sample's content, with `start` as the initial value.

    Equal content has an equal CRC in every process. If an object can't be pickled (an open file, a lock), only its type
    enters the CRC.
    """
    return _ContentCrc().add(sample, start)


class _ContentCrc:
    """A recursive computation of one sample's CRC.

    Where an object contains itself, the object's nesting depth enters the CRC instead of its content.
    """

    def __init__(self) -> None:
        self._enclosing_depths: dict[int, int] = {}  # by `id` of each object that encloses the current one

    def add(self, value: Any, start: int) -> int:
        """Return the CRC `start`, continued by the content of `value`."""
        if isinstance(value, torch.Tensor):
            return self._add_tensor(value, start)
        if isinstance(value, np.ndarray):
            return self._add_array(value, start)
        if isinstance(value, _REPR_TYPES):
            return zlib.crc32(repr(value).encode("utf-8", "surrogatepass"), start)
        if id(value) in self._enclosing_depths or len(self._enclosing_depths) > _MAX_DEPTH:
            return zlib.crc32(f"again {self._enclosing_depths.get(id(value), 0)}".encode(), start)
        self._enclosing_depths[id(value)] = len(self._enclosing_depths)
        try:
            return self._add_container(value, start)
        finally:
            del self._enclosing_depths[id(value)]

    def _add_container(self, value: Any, start: int) -> int:
        if isinstance(value, Mapping):
            for name in value:
                start = self.add(value[name], self._add_key(name, start))
            return start
        if isinstance(value, tuple | list):
            for part in value:
                start = self.add(part, start)
            return start
        if isinstance(value, Set):
            return self.add(sorted(self.add(part, 0) for part in value), start)
        if isinstance(value, _QUALNAME_TYPES):
            return zlib.crc32(f"{value.__module__}.{value.__qualname__}".encode(), start)
        if isinstance(value, MethodType):
            return self.add([value.__func__, value.__self__], start)
        return self._add_object(value, start)

    def _add_key(self, name: Any, start: int) -> int:
        return zlib.crc32(str(name).encode(), start) if isinstance(name, _REPR_TYPES) else self.add(name, start)

    def _add_object(self, value: Any, start: int) -> int:
        """Return the CRC over the parts from which `copy` and `pickle` rebuild the object."""
        type_name = f"{type(value).__module__}.{type(value).__qualname__}"
        start = zlib.crc32(type_name.encode(), start)
        try:
            pickle_parts = value.__reduce_ex__(4)
        except Exception:  # a file, a lock, a generator
            return start
        if isinstance(pickle_parts, str):
            return zlib.crc32(pickle_parts.encode(), start)
        return self.add([list(part) if hasattr(part, "__next__") else part for part in pickle_parts], start)

    def _add_array(self, array: np.ndarray[Any, Any], start: int) -> int:
        if array.dtype.hasobject:
            return self.add([list(array.shape), array.tolist()], start)
        return zlib.crc32(np.ascontiguousarray(array).tobytes(), start)

    def _add_tensor(self, value: torch.Tensor, start: int) -> int:
        value = value.detach()
        if value.is_nested:
            return self.add(list(value.unbind()), start)
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            return self.add([list(value.shape), value.indices(), value.values()], start)
        if value.layout in (torch.sparse_csr, torch.sparse_bsr):
            return self.add([list(value.shape), value.crow_indices(), value.col_indices(), value.values()], start)
        if value.layout in (torch.sparse_csc, torch.sparse_bsc):
            return self.add([list(value.shape), value.ccol_indices(), value.row_indices(), value.values()], start)
        if value.layout is not torch.strided:
            return self.add(value.to_dense(), start)
        if value.is_quantized:
            value = value.int_repr()
        plain = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return zlib.crc32(plain.view(torch.uint8).numpy().data, start)


def extend_checksum(total: int, crc: int) -> int:
    """Return the running checksum `total`, extended by the checksum `crc`."""
    return zlib.crc32(crc.to_bytes(4, "little"), total)
