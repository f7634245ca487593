"""Tensors in what a dataset or a model gives: mappings, sequences, named tuples, dataclasses of them, however deep."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset({bool, bytes, float, int, str, type(None), torch.device, torch.dtype, torch.layout})


def leaves(value: Any) -> Iterator[Tensor]:
    """Every tensor in it, in a fixed order."""
    found: list[Tensor] = []
    _gather(value, found)
    return iter(found)


def _gather(value: Any, found: list[Tensor]) -> None:
    if type(value) in _PLAIN:  # most of what an operation is given
        return
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for part in value:
            _gather(part, found)
    elif isinstance(value, Mapping):
        for part in value.values():
            _gather(part, found)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            _gather(getattr(value, item.name), found)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with each tensor changed, in the order of `leaves`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({name: mapped(part, change) for name, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: mapped(getattr(value, item.name), change) for item in fields(value)})
    return value


def rebuilt(value: Any, tensors: Iterator[Any]) -> Any:
    """The same structure with other tensors."""
    return mapped(value, lambda _: next(tensors))


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with every tensor on `device`."""
    return batch if device.type == "cpu" else mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
