"""The error for a batch that does not fit the model's forward. It suggests a `forward=` that may fit."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.errors import JobError
from paceline.user_code import is_user_file

_TARGETS = ("label", "labels", "target", "targets", "y")
_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def batch_mismatch_error(
    forward: Callable[..., Any], batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> JobError | None:
    """Return the error for a `forward` that does not accept these arguments, or None if it accepts them."""
    signature = inspect.signature(forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        owner = type(getattr(forward, "__self__", forward)).__name__
        passed = ", ".join([*map(_describe_value, args), *kwargs]) or "nothing"
        return JobError(
            f"{owner}.forward({', '.join(map(str, signature.parameters))}) does not fit the batch: {error}.",
            where=_source_line(forward),
            cause=f"the batch is {_describe_batch(batch)}; the default forward passes {passed}",
            hint=f"forward=lambda model, batch: model({', '.join(_suggest_arguments(signature, batch))})",
        )
    return None


def _source_line(forward: Callable[..., Any]) -> str:
    code = getattr(forward, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and is_user_file(code.co_filename) else ""


def _describe_value(value: Any) -> str:
    return f"{type(value).__name__}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _describe_batch(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}: {', '.join(map(_describe_value, batch))}"
    return f"a {_describe_value(batch)}"


def _suggest_arguments(signature: inspect.Signature, batch: Any) -> list[str]:
    """Return expressions for the entries of the batch to pass, one for each required argument of the forward.

    Tensors come first, likely targets last.
    """
    required = [p for p in signature.parameters.values() if p.kind in _POSITIONAL_KINDS and p.default is p.empty]
    if isinstance(batch, Mapping):
        keys = sorted(batch, key=lambda key: (key in _TARGETS, not isinstance(batch[key], Tensor)))
        by_name = {p.name: p.name for p in required if p.name in batch}
        remaining = iter([key for key in keys if key not in by_name])
        return [
            f'batch["{key}"]' for p in required if (key := by_name.get(p.name) or next(remaining, None)) is not None
        ]
    if isinstance(batch, tuple | list):
        positions = sorted(range(len(batch)), key=lambda position: not isinstance(batch[position], Tensor))
        return [f"batch[{position}]" for position in positions[: len(required)]]
    return ["batch"]
