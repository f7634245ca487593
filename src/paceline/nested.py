"""Tensors in what a dataset or a model gives: mappings, sequences, named tuples, dataclasses of them, however deep."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def leaves(value: Any) -> Iterator[Tensor]:
    """Every tensor in it, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from leaves(getattr(value, item.name))


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
