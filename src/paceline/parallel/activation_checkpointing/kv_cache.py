"""Copy or leave out the key-value caches that a model passes to its blocks, which training does not need."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


class KVCaches:
    """The caches among the arguments of one block's forward, recognized by their methods."""

    def __init__(self, *, block: nn.Module, forward: Callable[..., Any]) -> None:
        layers = (getattr(module, "layer_idx", None) for module in block.modules())
        self._layer = next((layer for layer in layers if isinstance(layer, int)), 0)
        self._names = list(inspect.signature(forward).parameters)

    def without_caches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with `use_cache=False` and None for each cache."""
        positional = [self._without_cache(self._argument_name(index), value) for index, value in enumerate(args)]
        return positional, {name: self._without_cache(name, value) for name, value in kwargs.items()}

    @staticmethod
    def with_copied_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with a shallow copy of each cache, for one run.

        Caches are not left out here. If there is no cache, the memory layout of tensors is different, and kernels may
        then sum in a different order.
        """
        return [_copy_caches(value) for value in args], {name: _copy_caches(value) for name, value in kwargs.items()}

    def find_filled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the name of a cache that is not empty for this block, or None."""
        named = [*((self._argument_name(index), value) for index, value in enumerate(args)), *kwargs.items()]
        return next((name for name, value in named if _is_cache(value) and value.get_seq_length(self._layer)), None)

    def _argument_name(self, position: int) -> str:
        return self._names[position] if position < len(self._names) else ""

    @staticmethod
    def _without_cache(name: str, value: Any) -> Any:
        if name == "use_cache":
            return False
        return None if _is_cache(value) else value


def _copy_caches(value: Any) -> Any:
    """Return a shallow copy of a cache, or of a list with caches; return other values unchanged."""
    if isinstance(value, list):
        return [_copy_caches(item) for item in value]
    if not _is_cache(value):
        return value
    copied = copy.copy(value)
    vars(copied).update(
        {key: dict(item) if isinstance(item, dict) else _copy_caches(item) for key, item in vars(value).items()}
    )
    return copied


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
