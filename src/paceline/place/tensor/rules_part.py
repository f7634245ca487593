"""Functions that take a part: slices, chunks, indices; and what a tensor says about itself."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.place.tensor.cut import Cut, Misfit
from paceline.place.tensor.rules_shape import like, need, positive
from paceline.place.tensor.split import Split, Unknown, rule


def narrowed(x: Split, dim: int, start: int, stop: int, *, sections: tuple[int, ...] = ()) -> Split:
    """`[start, stop)` along a dimension: anything where it is whole, whole sections where it is cut."""
    if dim != x.cut.dim:
        return like(x, x.local.narrow(dim, start, stop - start), x.cut)
    found = x.cut.sliced(start, stop)
    if found is None:
        parts = sections or tuple(n for n in (start, stop - start, x.cut.size - stop) if n)
        what = f"a slice [{start}:{stop}] of {x.cut.size}"
        raise Unknown(Misfit(what=what, sections=parts))
    first, last = found
    held = [fences[x.wire.rank + 1] - fences[x.wire.rank] for fences in x.cut.sections]
    cut = Cut(dim=dim, sections=x.cut.sections[first:last])
    return like(x, x.local.narrow(dim, sum(held[:first]), sum(held[first:last])), cut)


def _pieces(x: Split, dim: int, sizes: list[int]) -> tuple[Split, ...]:
    found, start = [], 0
    for size in sizes:
        found.append(narrowed(x, dim, start, start + size, sections=tuple(sizes)))
        start += size
    return tuple(found)


def _given(args: Any, kwargs: Any, *names: str) -> list[Any]:
    values = list(args[1 : 1 + len(names)])
    return values + [kwargs.get(name) for name in names[len(values) :]]


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    number, dim = (*args[1:], *kwargs.values(), 0)[:2]
    dim = positive(kwargs.get("dim", dim), len(x.whole))
    probe = torch.empty(x.whole[dim], device="meta")
    return _pieces(x, dim, [len(part) for part in getattr(Tensor, func.__name__)(probe, number)])


@rule("narrow")
def _narrow(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    dim, start, length = _given(args, kwargs, "dim", "start", "length")
    return narrowed(x, positive(dim, len(x.whole)), start, start + length)


@rule("select")
def _select(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    dim, index = _given(args, kwargs, "dim", "index")
    return _selected(x, positive(dim, len(x.whole)), index)


def _selected(x: Split, dim: int, index: int) -> Split:
    if dim == x.cut.dim:
        parts = (1,) * x.cut.size if x.cut.size <= 4 else ()
        raise Unknown(Misfit(what=f"one of {x.cut.size} taken from the cut dimension", sections=parts))
    return like(x, x.local.select(dim, index), x.cut.at(x.cut.dim - (dim < x.cut.dim)))


@rule("unbind", "__iter__")
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    dim = positive((_given(args, kwargs, "dim")[0]) or 0, len(x.whole))
    found = tuple(_selected(x, dim, index) for index in range(x.whole[dim]))
    return iter(found) if func.__name__ == "__iter__" else found


@rule("index_select")
def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    dim, index = _given(args, kwargs, "dim", "index")
    dim = positive(dim, len(x.whole))
    if dim == x.cut.dim:
        raise Unknown
    return like(x, x.local.index_select(dim, index), x.cut)


@rule("__getitem__")
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(i, Split) for i in index):
        raise Unknown
    index = _spelt_out(index, len(x.whole))
    at = _index_of_dim(index, x.cut.dim)
    own = index[at]
    if not isinstance(own, slice) or own.step not in (None, 1):
        raise Unknown
    start, stop, _ = own.indices(x.cut.size)
    x = narrowed(x, x.cut.dim, start, stop)
    index = (*index[:at], slice(None), *index[at + 1 :])
    return like(x, x.local[index], x.cut.at(_place_after(index, at)))


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
        raise Unknown
    return index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _index_of_dim(index: tuple[Any, ...], dim: int) -> int:
    seen = 0
    for at, i in enumerate(index):
        if seen <= dim < seen + _consumes(i):
            return at
        seen += _consumes(i)
    raise Unknown


def _place_after(index: tuple[Any, ...], at: int) -> int:
    """Where the dimension of entry `at` stands in the result; more than one index tensor has no rule."""
    tensors = [i for i in index if isinstance(i, Tensor | list)]
    if len(tensors) > 1 or (tensors and any(isinstance(i, int) for i in index)):
        raise Unknown
    place = 0
    for i in index[:at]:
        if isinstance(i, Tensor | list):
            place += 1 if isinstance(i, list) or i.dtype == torch.bool else i.dim()
        elif not isinstance(i, int):
            place += 1
    return place


@rule(".shape", "size")
def _shape(func: Any, args: Any, kwargs: Any) -> Any:
    whole = torch.Size(args[0].whole)
    given = (*args[1:], *kwargs.values())
    return whole if not given or given[0] is None else whole[given[0]]


@rule("numel", "nelement", "__len__", "dim", "ndimension", ".ndim")
def _says(func: Any, args: Any, kwargs: Any) -> Any:
    name, whole = func.__name__, args[0].whole
    return math.prod(whole) if name in ("numel", "nelement") else whole[0] if name == "__len__" else len(whole)


@rule(".dtype", ".device", ".requires_grad", ".is_cuda", ".grad_fn", ".is_leaf", ".layout", ".is_meta", ".is_sparse",
      ".is_quantized", ".is_cpu", ".is_mps", ".is_nested", "is_floating_point", "is_complex", "get_device",
      "element_size", "is_contiguous", "stride", "register_hook", "retain_grad", "new_zeros", "new_ones", "new_empty",
      "new_full", "new_tensor", "is_inference", "storage_offset", "is_pinned")  # fmt: skip
def _of_local(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


@rule("__repr__", "__str__", "__format__")
def _repr(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return f"Split({list(x.whole)}, dimension {x.cut.dim} over {x.wire.size} ranks, here {list(x.local.shape)})"


@rule("__hash__")
def _hash(func: Any, args: Any, kwargs: Any) -> Any:
    return id(args[0])
