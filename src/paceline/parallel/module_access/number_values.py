"""The value of a number attribute: which values count, and how values are compared and encoded for messages."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_TYPES: tuple[type, ...] = (type(None), bool, int, float)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MAX_INTEGER = 2**53  # float64 can't represent all larger integers
_MISSING_TYPE = -1.0
MISSING = "missing"
NUM_PER_VALUE = 2  # the float64 numbers that encode one value: its type and the value

Number = None | bool | int | float | tuple[int, float]
"""The value of an attribute; for a zero-dimensional tensor, the index of its dtype in `_DTYPES` and its value."""


def to_number(value: Any) -> Number | str:
    """Return the value of an attribute, or `MISSING` if it is no number, no None and no CPU tensor of one number."""
    if type(value) in _TYPES:  # a subclass, such as an IntEnum, is more than its number
        return value if not isinstance(value, int) or abs(value) <= _MAX_INTEGER else MISSING
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _DTYPES and type(value) is Tensor:
        is_plain = value.device.type == "cpu" and not value.requires_grad
        return (_DTYPES.index(value.dtype), float(value)) if is_plain else MISSING
    return MISSING


def is_same_number(old: Number | str, new: Number | str) -> bool:
    """Return whether two values have the same type and are equal; NaN equals NaN."""
    return old is new or (type(old) is type(new) and (old == new or (old != old and new != new)))


def fill_tensor(tensor: Any, value: tuple[int, float]) -> bool:
    """Write the value into a tensor of its dtype; return False if `tensor` is no such tensor."""
    if type(tensor) is not Tensor or tensor.dtype != _DTYPES[value[0]]:
        return False
    tensor.data.fill_(value[1])
    return True


def new_tensor(value: tuple[int, float]) -> Tensor:
    """Return a zero-dimensional tensor with the value."""
    return torch.tensor(value[1], dtype=_DTYPES[value[0]])


def encode_numbers(values: Sequence[Number | str]) -> list[float]:
    """Return `NUM_PER_VALUE` numbers for each value, which are exact in float64."""
    encoded: list[float] = []
    for value in values:
        if isinstance(value, tuple):
            encoded += [float(len(_TYPES) + value[0]), value[1]]
        elif isinstance(value, str):
            encoded += [_MISSING_TYPE, 0.0]
        else:
            type_index = next(index for index, kind in enumerate(_TYPES) if isinstance(value, kind))
            encoded += [float(type_index), float(value or 0)]
    return encoded


def decode_numbers(encoded: Sequence[float]) -> Iterator[Number | str]:
    """Yield the values that `encode_numbers` encoded."""
    for kind, value in zip(encoded[::NUM_PER_VALUE], encoded[1::NUM_PER_VALUE], strict=True):
        type_index = int(kind)
        if type_index >= len(_TYPES):
            yield type_index - len(_TYPES), value
        elif type_index < 0:
            yield MISSING
        else:
            yield None if type_index == 0 else _TYPES[type_index](value)
