"""Traversal of tensors in nested data and outputs: mappings, sequences, named tuples and dataclasses, at any depth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LEAF_TYPES = frozenset({bool, bytes, float, int, str, type(None), torch.device, torch.dtype, torch.layout})


def tensor_leaves(value: Any) -> Iterator[Tensor]:
    """Return an iterator over every tensor in a nested value, in a fixed order."""
    tensors: list[Tensor] = []
    _collect_tensors(value, tensors)
    return iter(tensors)


def _collect_tensors(value: Any, tensors: list[Tensor]) -> None:
    if type(value) in _LEAF_TYPES:  # most arguments of an operation
        return
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, tuple | list):
        for part in value:
            _collect_tensors(part, tensors)
    elif isinstance(value, Mapping):
        for part in value.values():
            _collect_tensors(part, tensors)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            _collect_tensors(getattr(value, item.name), tensors)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the same structure with each tensor replaced by `change(tensor)`, in the order of `tensor_leaves`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({name: map_tensors(part, change) for name, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: map_tensors(getattr(value, item.name), change) for item in fields(value)})
    return value


def map_leaves(value: Any, change: Callable[[str, Any], Any], *, is_leaf: Callable[[str, Any], bool], path: str) -> Any:
    """Return the same structure with `change(path, leaf)` in place of each leaf.

    A leaf is a value that `is_leaf(path, value)` accepts, or a value that is not a container. `change` and `is_leaf`
    get the path of the value as a Python expression that begins with `path`.
    """

    def map_part(name: str, part: Any) -> Any:
        return map_leaves(part, change, is_leaf=is_leaf, path=f"{path}{name}")

    if is_leaf(path, value):
        return change(path, value)
    if isinstance(value, Mapping):
        return type(value)({name: map_part(f"[{name!r}]", part) for name, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_part(f".{name}", part) for name, part in zip(value._fields, value, strict=True)))
    if isinstance(value, tuple | list):
        return type(value)(map_part(f"[{index}]", part) for index, part in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{i.name: map_part(f".{i.name}", getattr(value, i.name)) for i in fields(value)})
    return change(path, value)


def is_column(value: Any, num_samples: int) -> bool:
    """Return whether a value is a list, tuple or array with one entry per sample, and contains no tensor."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == num_samples
    is_list = isinstance(value, tuple | list) and not hasattr(value, "_fields")
    return is_list and len(value) == num_samples and not any(True for _ in tensor_leaves(value))


def is_square(value: Any) -> bool:
    """Return whether a list of n entries has only lists of n entries, so that rows and columns are ambiguous."""
    return all(isinstance(entry, tuple | list) and len(entry) == len(value) for entry in value)


def concatenate_columns(parts: Sequence[Any]) -> Any:
    """Return the concatenation of a column's parts, which come from several microbatches, in the first part's type."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return type(parts[0])(entry for part in parts for entry in part)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the same batch with every tensor on `device`."""
    return batch if device.type == "cpu" else map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
