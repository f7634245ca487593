"""Functions that move, read or copy: the cut moves with them."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.place.tensor.cut import Cut, Misfit, reshaped
from paceline.place.tensor.split import Split, Unknown, derived, rule
from paceline.place.tensor.wire import take_own


def positive(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim + ndim if dim < 0 else dim


def like(split: Split, local: Tensor, cut: Cut) -> Split:
    """A piece made of a piece."""
    return Split.of(local, cut, split.wire, origins=split.origins)


def need(value: Any) -> Split:
    """The cut argument; a function whose first argument is whole has no rule."""
    if not isinstance(value, Split):
        raise Unknown
    return value


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """`f(x, 2, 3)`, `f(x, (2, 3))` and `f(x, size=(2, 3))` alike."""
    given = args[1:] or tuple(kwargs.values())
    if len(given) == 1 and isinstance(given[0], tuple | list | torch.Size):
        given = tuple(given[0])
    if not all(isinstance(n, int) for n in given):
        raise Unknown
    return list(given)


def viewed(x: Split, sizes: list[int], func: Any = torch.reshape) -> Split:
    """Read as another shape."""
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
        sizes = [math.prod(x.whole) // max(known, 1) if n == -1 else n for n in sizes]
    if math.prod(sizes) != math.prod(x.whole):
        raise RuntimeError(f"shape {sizes} is invalid for input of size {math.prod(x.whole)}")
    cut = reshaped(x.cut, x.whole, tuple(sizes))
    if isinstance(cut, Misfit):
        raise Unknown(cut)
    listener = getattr(x.wire, "read_as", None)
    if listener is not None and cut.size != x.cut.size:
        listener(x.origins, cut.size)
    local = [cut.held(x.wire.rank) if d == cut.dim else n for d, n in enumerate(sizes)]
    return like(x, func(x.local, local), cut)


@rule("view", "reshape")
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    if len(args) == 2 and isinstance(args[1], torch.dtype):
        raise Unknown
    return viewed(x, sizes_of(args, kwargs), Tensor.view if func.__name__ == "view" else torch.reshape)


@rule("view_as", "reshape_as")
def _view_as(func: Any, args: Any, kwargs: Any) -> Any:
    return viewed(need(args[0]), list(args[1].shape))


@rule("flatten")
def _flatten(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    start = positive(args[1] if len(args) > 1 else kwargs.get("start_dim", 0), len(x.whole))
    end = positive(args[2] if len(args) > 2 else kwargs.get("end_dim", -1), len(x.whole))
    return viewed(x, [*x.whole[:start], math.prod(x.whole[start : end + 1]), *x.whole[end + 1 :]])


@rule("unflatten")
def _unflatten(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    dim = positive(args[1] if len(args) > 1 else kwargs["dim"], len(x.whole))
    sizes = list(args[2] if len(args) > 2 else kwargs["sizes"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.whole[dim] // -math.prod(sizes)
    return viewed(x, [*x.whole[:dim], *sizes, *x.whole[dim + 1 :]])


def _moved(x: Split, order: list[int]) -> Split:
    return like(x, x.local.permute(order), x.cut.at(order.index(x.cut.dim)))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    a, b = (positive(d, len(x.whole)) for d in (*args[1:], *kwargs.values()))
    order = list(range(len(x.whole)))
    order[a], order[b] = order[b], order[a]
    return _moved(x, order)


@rule("t", ".T", ".mT")
def _t(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    if len(x.whole) != 2:
        raise Unknown
    return _moved(x, [1, 0])


@rule("permute")
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    return _moved(x, [positive(d, len(x.whole)) for d in sizes_of(args, kwargs)])


@rule("movedim", "moveaxis")
def _movedim(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    marks = torch.empty([2 + d for d in range(len(x.whole))], device="meta")
    return _moved(x, [n - 2 for n in func(marks, *args[1:], **kwargs).shape])


@rule("unsqueeze")
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    dim = positive(dim, len(x.whole) + 1)
    return like(x, x.local.unsqueeze(dim), x.cut.at(x.cut.dim + (dim <= x.cut.dim)))


@rule("squeeze")
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    given = args[1] if len(args) > 1 else kwargs.get("dim", tuple(range(len(x.whole))))
    asked = {positive(d, len(x.whole)) for d in (given if isinstance(given, tuple | list) else (given,))}
    gone = sorted(d for d in asked if x.whole[d] == 1 and d != x.cut.dim)
    local = x.local.squeeze(tuple(gone)) if gone else x.local
    return like(x, local, x.cut.at(x.cut.dim - sum(d < x.cut.dim for d in gone)))


@rule("expand", "broadcast_to", "expand_as")
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    sizes = list(args[1].shape) if func.__name__ == "expand_as" else sizes_of(args, kwargs)
    at = x.cut.dim + len(sizes) - len(x.whole)
    if sizes[at] not in (-1, x.cut.size):
        raise Unknown
    sizes[at] = -1
    return like(x, x.local.expand(sizes), x.cut.at(at))


@rule("repeat_interleave")
def _repeat_interleave(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    times = args[1] if len(args) > 1 else kwargs["repeats"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(times, int) or dim is None:
        raise Unknown
    dim = positive(dim, len(x.whole))
    cut = x.cut.repeated(times) if dim == x.cut.dim else x.cut
    return like(x, x.local.repeat_interleave(times, dim), cut)


@rule("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda",
      "zeros_like", "ones_like", "full_like", "requires_grad_", ".data")  # fmt: skip
def _same(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    rest = [a.local if isinstance(a, Split) else a for a in args[1:]]
    made = x.local.data if func.__name__ == "__get__" else func(x.local, *rest, **kwargs)
    return x if made is x.local else like(x, made, x.cut)


@rule("cat", "concat", "concatenate")
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [t for t in (args[0] if args else kwargs["tensors"]) if t.dim() != 1 or len(t)]  # torch skips them too
    first = next(t for t in tensors if isinstance(t, Split))
    dim = positive(args[1] if len(args) > 1 else kwargs.get("dim", 0), len(first.whole))
    if any(isinstance(t, Split) and t.cut.dim != first.cut.dim for t in tensors):
        raise Unknown
    wire, origins = derived(t for t in tensors if isinstance(t, Split))
    if dim == first.cut.dim:
        if not all(isinstance(t, Split) for t in tensors):
            raise Unknown
        sections = tuple(section for t in tensors for section in t.cut.sections)
        return Split.of(torch.cat([t.local for t in tensors], dim), Cut(dim=dim, sections=sections), wire,
                        origins=origins)  # fmt: skip
    return Split.of(torch.cat([_piece(t, first) for t in tensors], dim), first.cut, wire, origins=origins)


@rule("stack")
def _stack(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = list(args[0] if args else kwargs["tensors"])
    first = next(t for t in tensors if isinstance(t, Split))
    dim = positive(args[1] if len(args) > 1 else kwargs.get("dim", 0), len(first.whole) + 1)
    wire, origins = derived(t for t in tensors if isinstance(t, Split))
    cut = first.cut.at(first.cut.dim + (dim <= first.cut.dim))
    return Split.of(torch.stack([_piece(t, first) for t in tensors], dim), cut, wire, origins=origins)


def _piece(tensor: Tensor, of: Split) -> Tensor:
    if isinstance(tensor, Split):
        if tensor.cut != of.cut:
            raise Unknown
        return tensor.local
    return take_own(tensor, of.cut, of.wire)
