"""Sharding rules of slicing, chunking and indexing, and of tensor attributes such as shape."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import map_ranks
from paceline.parallel.tensor_parallel.logical.logical_shards import call_with_values
from paceline.parallel.tensor_parallel.rules.views import positive_dim, require_sharded, wrap_like
from paceline.parallel.tensor_parallel.sharded_tensor import FunctionCall, NoRule, ShardPropagatingTensor, register_rule
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape
from paceline.torch_internals.private_api import tree_flatten


def narrow_sharded(
    x: ShardPropagatingTensor, dim: int, start: int, stop: int, *, sections: tuple[int, ...] = ()
) -> ShardPropagatingTensor:
    """Return `[start, stop)` along a dimension; along the sharded dimension the range must consist of full sections.

    If it does not, raise `NoRule`. It suggests sections: `sections` if given, otherwise three, whose sizes are those of
    the parts before the range, in it and after it.
    """
    if dim != x.sharding.dim:
        return wrap_like(x, x.local.narrow(dim, start, stop - start), x.sharding)
    section_range = x.sharding.find_sections(start, stop)
    if section_range is None:
        suggested_sections = sections or tuple(n for n in (start, stop - start, x.sharding.size - stop) if n)
        description = f"a slice [{start}:{stop}] of {x.sharding.size}"
        raise NoRule(IncompatibleReshape(description=description, sections=suggested_sections))
    first_section, last_section = section_range
    sharding = DimSharding(dim=dim, sections=x.sharding.sections[first_section:last_section])
    sections_before = DimSharding(dim=dim, sections=x.sharding.sections[:first_section])
    local_start = map_ranks(sections_before.local_size, x.group)
    local = call_with_values(torch.narrow, x.local, dim, local_start, map_ranks(sharding.local_size, x.group))
    return wrap_like(x, local, sharding)


def _narrow_by_sizes(x: ShardPropagatingTensor, dim: int, sizes: list[int]) -> tuple[ShardPropagatingTensor, ...]:
    slices, start = [], 0
    for size in sizes:
        slices.append(narrow_sharded(x, dim, start, start + size, sections=tuple(sizes)))
        start += size
    return tuple(slices)


@register_rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    dim = positive_dim(call["dim"], len(x.full_shape))
    (split_argument,) = (call[name] for name in call.arguments if name not in ("input", "dim"))
    vector = torch.empty(x.full_shape[dim], device="meta")  # torch splits it, which gives the sizes
    return _narrow_by_sizes(x, dim, [len(part) for part in getattr(Tensor, call.name)(vector, split_argument)])


@register_rule("narrow")
def _narrow(call: FunctionCall) -> Any:
    x, start, length = require_sharded(call["input"]), call["start"], call["length"]
    dim = positive_dim(call["dim"], len(x.full_shape))
    if isinstance(start, Tensor) or start < 0 or start + length > x.full_shape[dim]:
        raise NoRule
    return narrow_sharded(x, dim, start, start + length)


@register_rule("select")
def _select(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    return _select_index(x, positive_dim(call["dim"], len(x.full_shape)), call["index"])


def _select_index(x: ShardPropagatingTensor, dim: int, index: int) -> ShardPropagatingTensor:
    if dim == x.sharding.dim:
        suggested_sections = (1,) * x.sharding.size if x.sharding.size <= 4 else ()
        raise NoRule(
            IncompatibleReshape(
                description=f"an index into a sharded dimension of {x.sharding.size}", sections=suggested_sections
            )
        )
    return wrap_like(x, x.local.select(dim, index), x.sharding.with_dim(x.sharding.dim - (dim < x.sharding.dim)))


@register_rule("unbind")
def _unbind(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    dim = positive_dim(call["dim"], len(x.full_shape))
    return tuple(_select_index(x, dim, index) for index in range(x.full_shape[dim]))


@register_rule("__iter__")
def _iter(call: FunctionCall) -> Any:
    return iter(call.args[0].unbind(0))


@register_rule("index_select")
def _index_select(call: FunctionCall) -> Any:
    x, index = require_sharded(call["input"]), call["index"]
    dim = positive_dim(call["dim"], len(x.full_shape))
    if dim == x.sharding.dim or isinstance(index, ShardPropagatingTensor):
        raise NoRule
    return wrap_like(x, x.local.index_select(dim, index), x.sharding)


@register_rule("__getitem__")
def _getitem(call: FunctionCall) -> Any:
    x, raw_index = require_sharded(call.args[0]), call.args[1]
    index = tuple(_normalize_index(i) for i in (raw_index if isinstance(raw_index, tuple) else (raw_index,)))
    # torch treats a list of other entries than integers like a tuple of indices
    is_tuple_as_list = isinstance(raw_index, list) and any(not isinstance(i, int) for i in raw_index)
    if is_tuple_as_list or any(isinstance(i, ShardPropagatingTensor) for i in index):
        raise NoRule
    index = _expand_ellipsis(index, len(x.full_shape))
    position = _index_of_dim(index, x.sharding.dim)
    sharded_slice = index[position]
    if not isinstance(sharded_slice, slice) or sharded_slice.step not in (None, 1):
        raise NoRule
    start, stop, _ = sharded_slice.indices(x.sharding.size)
    x = narrow_sharded(x, x.sharding.dim, start, stop)
    index = (*index[:position], slice(None), *index[position + 1 :])
    return wrap_like(x, x.local[index], x.sharding.with_dim(_result_dim(index, position)))


def _normalize_index(index: Any) -> Any:
    """Return the index, or an index tensor for a list.

    Raises:
        NoRule: the index has no rule: a list that contains tensors, a uint8 mask, or another type, such as `range`.
    """
    if isinstance(index, list) and not any(isinstance(i, Tensor) for i in tree_flatten(index)[0]):
        return torch.as_tensor(index)
    is_supported = index is None or index is Ellipsis or isinstance(index, int | slice | Tensor)
    if not is_supported or (isinstance(index, Tensor) and index.dtype == torch.uint8):
        raise NoRule
    return index


def _expand_ellipsis(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Replace an ellipsis, or the missing entries at the end, by full slices."""
    num_indexed = sum(_num_indexed_dims(i) for i in index)
    if any(i is Ellipsis for i in index):
        position = next(n for n, i in enumerate(index) if i is Ellipsis)
        return (*index[:position], *[slice(None)] * (ndim - num_indexed), *index[position + 1 :])
    return (*index, *[slice(None)] * (ndim - num_indexed))


def _num_indexed_dims(index: Any) -> int:
    """Return the number of input dimensions that an index entry applies to."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, bool):
        raise NoRule
    return index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _index_of_dim(index: tuple[Any, ...], dim: int) -> int:
    """Return the position of the index entry that indexes a dimension."""
    dims_before = 0
    for position, i in enumerate(index):
        if dims_before <= dim < dims_before + _num_indexed_dims(i):
            return position
        dims_before += _num_indexed_dims(i)
    raise NoRule


def _result_dim(index: tuple[Any, ...], position: int) -> int:
    """Return the dimension of the result that comes from the index entry at `position`.

    Raises:
        NoRule: the index has several tensors, or a tensor and an integer.
    """
    tensors = [i for i in index if isinstance(i, Tensor)]
    if len(tensors) > 1 or (tensors and any(isinstance(i, int) for i in index)):
        raise NoRule
    result_dim = 0
    for i in index[:position]:
        if isinstance(i, Tensor):
            result_dim += 1 if i.dtype == torch.bool else i.dim()
        elif not isinstance(i, int):
            result_dim += 1
    return result_dim


@register_rule("size")
def _size(call: FunctionCall) -> Any:
    full_shape = torch.Size(call["input"].full_shape)
    return full_shape if call["dim"] is None else full_shape[call["dim"]]


@register_rule("numel", "nelement", "__len__", "dim", "ndimension", ".ndim", ".shape")
def _shape_attribute(call: FunctionCall) -> Any:
    name, (x,) = call.name, call.values()
    if name == ".shape":
        return torch.Size(x.full_shape)
    return (
        math.prod(x.full_shape)
        if name in ("numel", "nelement")
        else x.full_shape[0]
        if name == "__len__"
        else len(x.full_shape)
    )


@register_rule("stride")
def _stride(call: FunctionCall) -> Any:
    """Return the strides of a full tensor with the memory order of the shard."""
    x = call["input"]
    order = sorted(range(len(x.full_shape)), key=lambda d: (-x.local.stride(d), d))
    if not x.local.permute(order).is_contiguous():
        raise NoRule
    permuted = torch.empty([x.full_shape[d] for d in order], device="meta").permute(
        [order.index(d) for d in range(len(order))]
    )
    return permuted.stride() if call["dim"] is None else permuted.stride(call["dim"])


@register_rule(".dtype", ".device", ".requires_grad", ".is_cuda", ".grad_fn", ".is_leaf", ".layout", ".is_meta",
               ".is_sparse", ".is_quantized", ".is_cpu", ".is_mps", ".is_nested", "is_floating_point", "is_complex",
               "get_device", "element_size", "is_contiguous", "register_hook", "retain_grad", "new_zeros", "new_ones",
               "new_empty", "new_full", "new_tensor", "is_inference", "is_pinned")  # fmt: skip
def _local_attribute(call: FunctionCall) -> Any:
    """Call the function on the local shard; its result does not depend on the tensor's shape."""
    x = call.args[0] if call.args else call.kwargs.get("input")
    if not isinstance(x, ShardPropagatingTensor) or any(
        isinstance(value, ShardPropagatingTensor) for value in call.values() if value is not x
    ):
        raise NoRule
    return call.call_with(lambda value: x.local if value is x else value)


@register_rule("__repr__", "__str__", "__format__")
def _repr(call: FunctionCall) -> Any:
    x = call.args[0]
    return (
        f"Split({list(x.full_shape)}, dimension {x.sharding.dim} over {x.group.size} ranks, here {list(x.local.shape)})"
    )


@register_rule("__hash__")
def _hash(call: FunctionCall) -> Any:
    return id(call.args[0])
