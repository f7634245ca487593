"""A tensor subclass that consists of the logical shards which this rank holds of a sharded tensor.

In exact mode, a weight is split into a fixed number of logical shards, and each rank holds several of them. A torch
function on logical shards computes each shard separately. So its kernels see the same shapes for any number of ranks,
and give the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.errors import LayoutError
from paceline.torch_internals.private_api import make_wrapper_tensor

# These functions return the same value for each shard, or one new tensor that does not depend on the shard's values.
_SHARD_INDEPENDENT = frozenset((
    "dim", "ndimension", "size", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "is_inference", "get_device", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
))  # fmt: skip
_WRAPPER_ATTRIBUTES = frozenset((Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__))  # type: ignore[attr-defined]


class ShardValues:
    """The values of one argument, such as a length, that differs between the logical shards of a rank."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)


class LogicalShards(Tensor):
    """The logical shards of this rank as one tensor; attributes such as `shape` are those of the first shard.

    Arguments that are plain tensors are the same for every shard.
    """

    _shards: tuple[Tensor, ...] | None
    _split: Callable[[], Sequence[Tensor]]

    @staticmethod
    def from_shards(shards: Sequence[Tensor]) -> "LogicalShards":
        """Combine the shards of this rank, in the order of their logical ranks."""
        first = shards[0]
        tensor: LogicalShards = make_wrapper_tensor(LogicalShards, like=first, shape=first.shape)
        tensor._shards = tuple(shards)
        return tensor

    @staticmethod
    def from_split(split: Callable[[], Sequence[Tensor]], *, like: Tensor, shape: Sequence[int]) -> "LogicalShards":
        """Return shards that `split` computes when they are read for the first time.

        `shape` is the shape of the first shard, and `like` has its dtype and device.
        """
        tensor: LogicalShards = make_wrapper_tensor(LogicalShards, like=like, shape=shape)
        tensor._shards, tensor._split = None, split
        return tensor

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The shards of this rank, in the order of their logical ranks."""
        if self._shards is None:
            with torch.enable_grad():
                self._shards = tuple(self._split())
        return self._shards

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply the function to each shard."""
        kwargs = kwargs or {}
        if func in _WRAPPER_ATTRIBUTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if getattr(func, "__name__", "") in _SHARD_INDEPENDENT:
            return func(*_select(args, 0), **_select(kwargs, 0))
        results = [func(*_select(args, 0), **_select(kwargs, 0))]
        if func.__class__.__name__ == "method-wrapper" and not isinstance(results[0], Tensor):
            return results[0]  # an attribute such as `shape` or `dtype`
        num_shards = next(len(value.shards) for value in _flat_values(args, kwargs) if isinstance(value, LogicalShards))
        results += [func(*_select(args, index), **_select(kwargs, index)) for index in range(1, num_shards)]
        return _combine(results, [*args, *kwargs.values()])

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise an error: only code that bypasses `__torch_function__` reaches this method, without a gradient."""
        raise LayoutError(
            f"{func} was called on logical shards of a tensor.",
            cause="a custom operator, which exact mode can't apply to each logical shard",
            hint="do not split the module that calls it: --place.replicate ITS_NAME",
        )


def call_with_values(func: Callable[..., Any], *args: Any) -> Any:
    """Call a function on shards; arguments may be `ShardValues`, which torch itself does not accept."""
    has_shards = any(isinstance(value, LogicalShards) for value in args)
    return LogicalShards.__torch_function__(func, (), args) if has_shards else func(*args)


def _flat_values(args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments, and the elements of those that are lists or tuples."""
    flat: list[Any] = []
    for value in (*args, *kwargs.values()):
        flat.extend(value) if isinstance(value, list | tuple) else flat.append(value)
    return flat


def _select(value: Any, index: int) -> Any:
    """Return an argument, or a container of arguments, for one shard."""
    if isinstance(value, LogicalShards):
        return value.shards[index]
    if isinstance(value, ShardValues):
        return value.values[index]
    if type(value) is tuple:
        return tuple([_select(element, index) for element in value])
    if type(value) is list:
        return [_select(element, index) for element in value]
    if type(value) is dict:
        return {key: _select(element, index) for key, element in value.items()}
    return value


def _combine(results: list[Any], arguments: list[Any]) -> Any:
    """Return the results of all shards as one; a function that works in place returns its argument."""
    first = results[0]
    if isinstance(first, Tensor):
        for argument in arguments:
            if isinstance(argument, LogicalShards) and argument.shards[0] is first:
                return argument
        return LogicalShards.from_shards(results)
    if isinstance(first, list | tuple) and any(isinstance(element, Tensor) for element in first):
        parts = [_combine(list(elements), []) for elements in zip(*results, strict=True)]
        return parts if type(first) is list else tuple(parts) if type(first) is tuple else type(first)(parts)
    return first
