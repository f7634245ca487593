"""A mode that keeps float64 computations in float64, because many models compute norms, softmax and loss in float32.

The rounding of a float32 operation would hide the small differences that a float64 comparison should find. So float64
tensors are not cast down while such a comparison runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_PATCHED_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "float"),
    (torch.Tensor, "to"),
    (torch.Tensor, "type"),
    (torch.Tensor, "softmax"),
    (torch.Tensor, "log_softmax"),
    (torch, "softmax"),
    (torch, "log_softmax"),
    (torch.nn.functional, "softmax"),
    (torch.nn.functional, "log_softmax"),
)


@contextmanager
def keep_float64(*, active: bool = True) -> Iterator[None]:
    """Prevent casts of float64 tensors to float32, on any thread of this process."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in _PATCHED_FUNCTIONS] if active else []
    for owner, name, original in originals:
        setattr(owner, name, _wrap_for_float64(original, is_float_cast=name == "float"))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _wrap_for_float64(original: Callable[..., Any], *, is_float_cast: bool) -> Callable[..., Any]:
    @wraps(original)  # sharded tensors find the rule of a function by its name
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(first, Tensor) or first.dtype is not torch.float64:
            return original(first, *args, **kwargs)
        if is_float_cast:
            return first
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return original(first, *args, **kwargs)

    return call
