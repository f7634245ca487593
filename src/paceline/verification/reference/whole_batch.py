"""Merge several microbatches in one process: for a loss over the whole global batch, and for layers that see it all.

Tensors are concatenated along their first dimension; lists and arrays of other things (texts, objects) are
concatenated if they have an entry for each sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.data.checksum import checksum
from paceline.torch_internals.pytree import is_column, is_square, joined_columns

Choose = Callable[[Sequence[Any]], Any]


def part_of(values: Sequence[Any], *, live: int, sizes: Sequence[int]) -> Any:
    """Merge all microbatches' outputs (or batches), with only one microbatch's attached to autograd."""

    def tensor(parts: Sequence[Tensor]) -> Tensor:
        own = parts[live]
        if own.dim():
            return torch.cat([t if j == live else t.detach() for j, t in enumerate(parts)])
        # a scalar of the whole batch: each microbatch gets its part of the gradient
        return own.detach() + (own - own.detach()) / len(parts) if own.requires_grad else own

    return _join(values, sizes, _Ways(tensor=tensor, column=joined_columns, other=lambda parts: parts[live]))


def merge_microbatches(parts: Sequence[Any], sizes: Sequence[int], collated: Callable[[], Any]) -> Any:
    """Merge microbatches for layers that see all replicas at once; collate again if they can't be merged."""
    try:
        return parts[0] if len(parts) == 1 else _join(parts, sizes, _MERGED)
    except (TypeError, RuntimeError):
        return collated()


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """The functions that merge tensors, columns, and everything else at one place of the structure."""

    tensor: Choose
    column: Choose
    other: Choose


def _join(parts: Sequence[Any], sizes: Sequence[int], ways: _Ways) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return ways.tensor(parts)
    if isinstance(first, Mapping):
        found = {name: _join([part[name] for part in parts], sizes, ways) for name in first}
        return type(first)(found)  # type: ignore[call-arg]
    if all(is_column(part, size) for part, size in zip(parts, sizes, strict=True)):
        return ways.column(parts)
    if isinstance(first, tuple | list):
        columns = [_join(column, sizes, ways) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in fields(first)]
        return replace(first, **{name: _join([getattr(part, name) for part in parts], sizes, ways) for name in names})
    return ways.other(parts)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].dim():
        raise TypeError("a tensor without dimensions")
    return torch.cat(list(parts))


def _same(parts: Sequence[Any]) -> Any:
    if any(type(part) is not type(parts[0]) or checksum(part, 0) != checksum(parts[0], 0) for part in parts):
        raise TypeError(type(parts[0]).__name__)
    return parts[0]


def _same_side_up(parts: Sequence[Any]) -> Any:
    if all(map(is_square, parts)):
        raise TypeError("rows or columns")
    return joined_columns(parts)


_MERGED = _Ways(tensor=_concatenated, column=_same_side_up, other=_same)
