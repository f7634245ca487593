"""Sharding rules of functions that take a part (slices, chunks, indices), and of tensor attributes such as shape."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor_parallel.rules.views import need_cut_argument, piece_like, positive_dim
from paceline.parallel.tensor_parallel.sharded_tensor import FunctionCall, NoRule, ShardPropagatingTensor, rule
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape
from paceline.torch_internals.private_api import tree_flatten


def narrow_piece(
    x: ShardPropagatingTensor, dim: int, start: int, stop: int, *, sections: tuple[int, ...] = ()
) -> ShardPropagatingTensor:
    """Return `[start, stop)` along a dimension: any range of a whole dimension, whole sections of the sharded one."""
    if dim != x.cut.dim:
        return piece_like(x, x.local.narrow(dim, start, stop - start), x.cut)
    found = x.cut.sliced(start, stop)
    if found is None:
        parts = sections or tuple(n for n in (start, stop - start, x.cut.size - stop) if n)
        what = f"a slice [{start}:{stop}] of {x.cut.size}"
        raise NoRule(IncompatibleReshape(what=what, sections=parts))
    first, last = found
    held = [fences[x.wire.rank + 1] - fences[x.wire.rank] for fences in x.cut.sections]
    cut = DimSharding(dim=dim, sections=x.cut.sections[first:last])
    return piece_like(x, x.local.narrow(dim, sum(held[:first]), sum(held[first:last])), cut)


def _pieces(x: ShardPropagatingTensor, dim: int, sizes: list[int]) -> tuple[ShardPropagatingTensor, ...]:
    found, start = [], 0
    for size in sizes:
        found.append(narrow_piece(x, dim, start, start + size, sections=tuple(sizes)))
        start += size
    return tuple(found)


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(call: FunctionCall) -> Any:
    x, dim = need_cut_argument(call["input"]), call["dim"]
    dim, (number,) = (
        positive_dim(dim, len(x.whole)),
        (call[name] for name in call.given if name not in ("input", "dim")),
    )
    probe = torch.empty(x.whole[dim], device="meta")
    return _pieces(x, dim, [len(part) for part in getattr(Tensor, call.name)(probe, number)])


@rule("narrow")
def _narrow(call: FunctionCall) -> Any:
    x, start, length = need_cut_argument(call["input"]), call["start"], call["length"]
    dim = positive_dim(call["dim"], len(x.whole))
    if isinstance(start, Tensor) or start < 0 or start + length > x.whole[dim]:
        raise NoRule
    return narrow_piece(x, dim, start, start + length)


@rule("select")
def _select(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    return _selected(x, positive_dim(call["dim"], len(x.whole)), call["index"])


def _selected(x: ShardPropagatingTensor, dim: int, index: int) -> ShardPropagatingTensor:
    if dim == x.cut.dim:
        parts = (1,) * x.cut.size if x.cut.size <= 4 else ()
        raise NoRule(IncompatibleReshape(what=f"one of {x.cut.size} taken from the split dimension", sections=parts))
    return piece_like(x, x.local.select(dim, index), x.cut.at(x.cut.dim - (dim < x.cut.dim)))


@rule("unbind")
def _unbind(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    dim = positive_dim(call["dim"], len(x.whole))
    return tuple(_selected(x, dim, index) for index in range(x.whole[dim]))


@rule("__iter__")
def _iter(call: FunctionCall) -> Any:
    return iter(call.args[0].unbind(0))


@rule("index_select")
def _index_select(call: FunctionCall) -> Any:
    x, index = need_cut_argument(call["input"]), call["index"]
    dim = positive_dim(call["dim"], len(x.whole))
    if dim == x.cut.dim or isinstance(index, ShardPropagatingTensor):
        raise NoRule
    return piece_like(x, x.local.index_select(dim, index), x.cut)


@rule("__getitem__")
def _getitem(call: FunctionCall) -> Any:
    x, asked = need_cut_argument(call.args[0]), call.args[1]
    index = tuple(_as_tensor(i) for i in (asked if isinstance(asked, tuple) else (asked,)))
    is_several = isinstance(asked, list) and any(not isinstance(i, int) for i in asked)  # torch reads it as a tuple
    if is_several or any(isinstance(i, ShardPropagatingTensor) for i in index):
        raise NoRule
    index = _spelt_out(index, len(x.whole))
    at = _index_of_dim(index, x.cut.dim)
    own = index[at]
    if not isinstance(own, slice) or own.step not in (None, 1):
        raise NoRule
    start, stop, _ = own.indices(x.cut.size)
    x = narrow_piece(x, x.cut.dim, start, stop)
    index = (*index[:at], slice(None), *index[at + 1 :])
    return piece_like(x, x.local[index], x.cut.at(_place_after(index, at)))


def _as_tensor(index: Any) -> Any:
    """Convert a list to an index tensor. Indices that torch reads in other ways, such as `range`, have no rule."""
    if isinstance(index, list) and not any(isinstance(i, Tensor) for i in tree_flatten(index)[0]):
        return torch.as_tensor(index)
    known = index is None or index is Ellipsis or isinstance(index, int | slice | Tensor)
    if not known or (isinstance(index, Tensor) and index.dtype == torch.uint8):
        raise NoRule
    return index


def _spelt_out(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    used = sum(_consumes(i) for i in index)
    if any(i is Ellipsis for i in index):
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        return (*index[:at], *[slice(None)] * (ndim - used), *index[at + 1 :])
    return (*index, *[slice(None)] * (ndim - used))


def _consumes(index: Any) -> int:
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, bool):
        raise NoRule
    return index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _index_of_dim(index: tuple[Any, ...], dim: int) -> int:
    seen = 0
    for at, i in enumerate(index):
        if seen <= dim < seen + _consumes(i):
            return at
        seen += _consumes(i)
    raise NoRule


def _place_after(index: tuple[Any, ...], at: int) -> int:
    """Return the position in the result of the dimension of entry `at`. Raises `NoRule` for several index tensors."""
    tensors = [i for i in index if isinstance(i, Tensor)]
    if len(tensors) > 1 or (tensors and any(isinstance(i, int) for i in index)):
        raise NoRule
    place = 0
    for i in index[:at]:
        if isinstance(i, Tensor):
            place += 1 if i.dtype == torch.bool else i.dim()
        elif not isinstance(i, int):
            place += 1
    return place


@rule("size")
def _size(call: FunctionCall) -> Any:
    whole = torch.Size(call["input"].whole)
    return whole if call["dim"] is None else whole[call["dim"]]


@rule("numel", "nelement", "__len__", "dim", "ndimension", ".ndim", ".shape")
def _says(call: FunctionCall) -> Any:
    name, (x,) = call.name, call.values()
    if name == ".shape":
        return torch.Size(x.whole)
    return math.prod(x.whole) if name in ("numel", "nelement") else x.whole[0] if name == "__len__" else len(x.whole)


@rule("stride")
def _stride(call: FunctionCall) -> Any:
    """Return the strides of the whole tensor in the memory order of the shard."""
    x = call["input"]
    order = sorted(range(len(x.whole)), key=lambda d: (-x.local.stride(d), d))
    if not x.local.permute(order).is_contiguous():
        raise NoRule
    laid = torch.empty([x.whole[d] for d in order], device="meta").permute([order.index(d) for d in range(len(order))])
    return laid.stride() if call["dim"] is None else laid.stride(call["dim"])


@rule(".dtype", ".device", ".requires_grad", ".is_cuda", ".grad_fn", ".is_leaf", ".layout", ".is_meta", ".is_sparse",
      ".is_quantized", ".is_cpu", ".is_mps", ".is_nested", "is_floating_point", "is_complex", "get_device",
      "element_size", "is_contiguous", "register_hook", "retain_grad", "new_zeros", "new_ones", "new_empty",
      "new_full", "new_tensor", "is_inference", "is_pinned")  # fmt: skip
def _of_local(call: FunctionCall) -> Any:
    x = call.args[0] if call.args else call.kwargs.get("input")
    if not isinstance(x, ShardPropagatingTensor) or any(
        isinstance(value, ShardPropagatingTensor) for value in call.values() if value is not x
    ):
        raise NoRule
    return call.replacing(lambda value: x.local if value is x else value)


@rule("__repr__", "__str__", "__format__")
def _repr(call: FunctionCall) -> Any:
    x = call.args[0]
    return f"Split({list(x.whole)}, dimension {x.cut.dim} over {x.wire.size} ranks, here {list(x.local.shape)})"


@rule("__hash__")
def _hash(call: FunctionCall) -> Any:
    return id(call.args[0])
