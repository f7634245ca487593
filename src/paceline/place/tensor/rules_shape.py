"""Functions that move, read or copy: the cut moves with them."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.place.tensor.cut import Cut, Misfit, reshaped
from paceline.place.tensor.split import Call, Split, Unknown, derived, rule
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


@rule("view")
def _view(call: Call) -> Any:
    return viewed(need(call["input"]), [*call["size"]], Tensor.view)


@rule("reshape")
def _reshape(call: Call) -> Any:
    return viewed(need(call["input"]), [*call["shape"]])


@rule("view_as", "reshape_as")
def _view_as(call: Call) -> Any:
    return viewed(need(call["input"]), list(call["other"].shape))


@rule("flatten")
def _flatten(call: Call) -> Any:
    x = need(call["input"])
    start, end = (positive(call[name], len(x.whole)) for name in ("start_dim", "end_dim"))
    return viewed(x, [*x.whole[:start], math.prod(x.whole[start : end + 1]), *x.whole[end + 1 :]])


@rule("unflatten")
def _unflatten(call: Call) -> Any:
    x, sizes = need(call["input"]), list(call["sizes"])
    dim = positive(call["dim"], len(x.whole))
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.whole[dim] // -math.prod(sizes)
    return viewed(x, [*x.whole[:dim], *sizes, *x.whole[dim + 1 :]])


def _moved(x: Split, order: list[int]) -> Split:
    return like(x, x.local.permute(order), x.cut.at(order.index(x.cut.dim)))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(call: Call) -> Any:
    x = need(call["input"])
    a, b = (positive(call[name], len(x.whole)) for name in ("dim0", "dim1"))
    order = list(range(len(x.whole)))
    order[a], order[b] = order[b], order[a]
    return _moved(x, order)


@rule("t", ".T", ".mT")
def _t(call: Call) -> Any:
    x = need(call.args[0] if call.args else call["input"])
    last = len(x.whole) - 1
    if last < 1 or (last > 1 and call.name != ".mT"):
        raise Unknown
    return _moved(x, [*range(last - 1), last, last - 1])


@rule("permute")
def _permute(call: Call) -> Any:
    x = need(call["input"])
    return _moved(x, [positive(d, len(x.whole)) for d in call["dims"]])


@rule("movedim", "moveaxis")
def _movedim(call: Call) -> Any:
    x = need(call["input"])
    marks = torch.empty([2 + d for d in range(len(x.whole))], device="meta")
    return _moved(x, [n - 2 for n in marks.movedim(call["source"], call["destination"]).shape])


@rule("unsqueeze")
def _unsqueeze(call: Call) -> Any:
    x = need(call["input"])
    dim = positive(call["dim"], len(x.whole) + 1)
    return like(x, x.local.unsqueeze(dim), x.cut.at(x.cut.dim + (dim <= x.cut.dim)))


@rule("squeeze")
def _squeeze(call: Call) -> Any:
    x = need(call["input"])
    asked = {positive(d, len(x.whole)) for d in call.given.get("dim", range(len(x.whole)))}
    gone = sorted(d for d in asked if x.whole[d] == 1)
    if x.cut.dim in gone:
        raise Unknown
    local = x.local.squeeze(tuple(gone)) if gone else x.local
    return like(x, local, x.cut.at(x.cut.dim - sum(d < x.cut.dim for d in gone)))


@rule("expand_as")
def _expand_as(call: Call) -> Any:
    return _expanded(need(call["input"]), list(call["other"].shape))


@rule("expand", "broadcast_to")
def _expand(call: Call) -> Any:
    return _expanded(need(call["input"]), [*call["size"]])


def _expanded(x: Split, sizes: list[int]) -> Split:
    at = x.cut.dim + len(sizes) - len(x.whole)
    if at < 0 or sizes[at] not in (-1, x.cut.size):
        raise Unknown
    sizes[at] = -1
    return like(x, x.local.expand(sizes), x.cut.at(at))


@rule("repeat_interleave")
def _repeat_interleave(call: Call) -> Any:
    x, times, dim = need(call["input"]), call["repeats"], call["dim"]
    if not isinstance(times, int) or dim is None:
        raise Unknown
    dim = positive(dim, len(x.whole))
    cut = x.cut.repeated(times) if dim == x.cut.dim else x.cut
    return like(x, x.local.repeat_interleave(times, dim), cut)


@rule("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda",
      "zeros_like", "ones_like", "full_like", "requires_grad_", ".data")  # fmt: skip
def _same(call: Call) -> Any:
    x = next(value for value in call.values() if isinstance(value, Split))
    if call.args[:1] != (x,) and call.kwargs.get("input") is not x:
        raise Unknown  # `whole.to(cut)`, `whole.type_as(cut)`
    made = call.replacing(lambda value: value.local if isinstance(value, Split) else value)
    if not isinstance(made, Tensor):
        return made  # the name of its type
    return x if made is x.local else like(x, made, x.cut)


@rule("cat", "concat", "concatenate")
def _cat(call: Call) -> Any:
    tensors = [t for t in call["tensors"] if t.dim() != 1 or len(t)]  # torch skips them too
    first = next(t for t in tensors if isinstance(t, Split))
    dim = positive(call["dim"], len(first.whole))
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
def _stack(call: Call) -> Any:
    tensors = list(call["tensors"])
    first = next(t for t in tensors if isinstance(t, Split))
    dim = positive(call["dim"], len(first.whole) + 1)
    wire, origins = derived(t for t in tensors if isinstance(t, Split))
    cut = first.cut.at(first.cut.dim + (dim <= first.cut.dim))
    return Split.of(torch.stack([_piece(t, first) for t in tensors], dim), cut, wire, origins=origins)


def _piece(tensor: Tensor, of: Split) -> Tensor:
    if isinstance(tensor, Split):
        if tensor.cut != of.cut or len(tensor.whole) != len(of.whole):
            raise Unknown
        return tensor.local
    if tensor.dim() != len(of.whole) or tensor.shape[of.cut.dim] != of.cut.size:
        raise Unknown
    return take_own(tensor, of.cut, of.wire)
