"""Merge several microbatches in one process: for a loss over the global batch, and for layers that see all replicas.

Tensors are concatenated along their first dimension; lists and arrays of other values (texts, objects) are
concatenated if they have an entry for each sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.data.checksum import checksum
from paceline.torch_internals.pytree import concatenate_columns, is_column, is_square

Merge = Callable[[Sequence[Any]], Any]


def merge_with_one_attached(values: Sequence[Any], *, attached_index: int, sizes: Sequence[int]) -> Any:
    """Merge the outputs (or data) of all microbatches. Only microbatch `attached_index` stays attached to autograd."""

    def merge_tensors(parts: Sequence[Tensor]) -> Tensor:
        attached = parts[attached_index]
        if attached.dim():
            return torch.cat([t if j == attached_index else t.detach() for j, t in enumerate(parts)])
        # a scalar of the whole batch: each microbatch gets its part of the gradient
        return attached.detach() + (attached - attached.detach()) / len(parts) if attached.requires_grad else attached

    return _merge(
        values,
        sizes,
        _MergeFunctions(tensor=merge_tensors, column=concatenate_columns, default=lambda parts: parts[attached_index]),
    )


def merge_microbatches(parts: Sequence[Any], sizes: Sequence[int], collate_again: Callable[[], Any]) -> Any:
    """Merge microbatches for layers that see all replicas at once; if that fails, return `collate_again()`."""
    try:
        return parts[0] if len(parts) == 1 else _merge(parts, sizes, _MERGE_FUNCTIONS)
    except (TypeError, RuntimeError):
        return collate_again()


@dataclass(frozen=True, kw_only=True)
class _MergeFunctions:
    """The functions that merge tensors, columns, and all other values of a nested structure."""

    tensor: Merge
    column: Merge
    default: Merge


def _merge(parts: Sequence[Any], sizes: Sequence[int], functions: _MergeFunctions) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return functions.tensor(parts)
    if isinstance(first, Mapping):
        merged = {name: _merge([part[name] for part in parts], sizes, functions) for name in first}
        return type(first)(merged)  # type: ignore[call-arg]
    if all(is_column(part, size) for part, size in zip(parts, sizes, strict=True)):
        return functions.column(parts)
    if isinstance(first, tuple | list):
        columns = [_merge(column, sizes, functions) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in fields(first)]
        return replace(
            first, **{name: _merge([getattr(part, name) for part in parts], sizes, functions) for name in names}
        )
    return functions.default(parts)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].dim():
        raise TypeError("a tensor without dimensions")
    return torch.cat(list(parts))


def _require_equal(parts: Sequence[Any]) -> Any:
    """Return the value that all parts have; raise a TypeError if they differ, so that they are collated again."""
    if any(type(part) is not type(parts[0]) or checksum(part, 0) != checksum(parts[0], 0) for part in parts):
        raise TypeError(type(parts[0]).__name__)
    return parts[0]


def _merge_columns(parts: Sequence[Any]) -> Any:
    if all(map(is_square, parts)):
        raise TypeError("a square list, whose rows may be samples or not")
    return concatenate_columns(parts)


_MERGE_FUNCTIONS = _MergeFunctions(tensor=_concatenate, column=_merge_columns, default=_require_equal)
