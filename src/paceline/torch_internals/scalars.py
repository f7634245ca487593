"""Conversion of numbers from Python, NumPy or one-element tensors."""

from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor


def as_number(value: Any) -> int | float | None:
    """Return `value` as a Python number, or None if it is not a real number."""
    if isinstance(value, Tensor):
        return None if value.numel() != 1 or value.is_complex() else value.item()
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else None
    if isinstance(value, int | float):
        return value
    return float(value) if isinstance(value, Real | Decimal) else None


def as_integer(value: Any) -> int | None:
    """Return `value` as an integer, or None if it is not an integer; True and False are not integers."""
    number = as_number(value)
    return number if isinstance(number, int) and not isinstance(number, bool) else None
