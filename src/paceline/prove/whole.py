"""Several microbatches as one in one process: for a loss over the whole global batch, and for layers that see it all.

Tensors are joined along their first dimension, lists of what is no tensor (texts, objects) one after another where they
have an entry for each sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.nested import leaves

Choose = Callable[[Sequence[Any]], Any]


def part_of(values: Sequence[Any], *, live: int, sizes: Sequence[int]) -> Any:
    """All microbatches' outputs (or batches) as one, of which autograd knows only one microbatch's."""

    def tensor(parts: Sequence[Tensor]) -> Tensor:
        own = parts[live]
        if own.dim():
            return torch.cat([t if j == live else t.detach() for j, t in enumerate(parts)])
        # everybody's: each microbatch has its part of the gradient
        return own.detach() + (own - own.detach()) / len(parts) if own.requires_grad else own

    return _join(values, sizes, tensor, lambda parts: parts[live])


def merged(parts: Sequence[Any], sizes: Sequence[int], collated: Callable[[], Any]) -> Any:
    """Join microbatches for layers that see all replicas at once; where they can't be joined, collate again."""
    try:
        return parts[0] if len(parts) == 1 else _join(parts, sizes, _concatenated, _same)
    except (TypeError, RuntimeError):
        return collated()


def _join(parts: Sequence[Any], sizes: Sequence[int], tensor: Choose, other: Choose) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return tensor(parts)
    if isinstance(first, Mapping):
        found = {name: _join([part[name] for part in parts], sizes, tensor, other) for name in first}
        return type(first)(found)  # type: ignore[call-arg]
    if isinstance(first, tuple | list):
        if not any(True for _ in leaves(first)) and [len(part) for part in parts] == list(sizes):
            return type(first)(entry for part in parts for entry in part)
        columns = [_join(column, sizes, tensor, other) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in fields(first)]
        joined = {name: _join([getattr(part, name) for part in parts], sizes, tensor, other) for name in names}
        return replace(first, **joined)
    return other(parts)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    if not parts[0].dim():
        raise TypeError("a tensor without dimensions")
    return torch.cat(list(parts))


def _same(parts: Sequence[Any]) -> Any:
    if any(type(part) is not type(parts[0]) or part != parts[0] for part in parts):
        raise TypeError(type(parts[0]).__name__)
    return parts[0]
