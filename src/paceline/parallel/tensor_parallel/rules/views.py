"""Sharding rules of views, copies and concatenations: the sharding moves with the dimension."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import take_own
from paceline.parallel.tensor_parallel.sharded_tensor import (
    FunctionCall,
    NoRule,
    ShardPropagatingTensor,
    rule,
    wire_and_origins,
)
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape, reshape_cut


def positive_dim(dim: int, ndim: int) -> int:
    """Return a dimension counted from the front."""
    return dim + ndim if dim < 0 else dim


def piece_like(split: ShardPropagatingTensor, local: Tensor, cut: DimSharding) -> ShardPropagatingTensor:
    """Wrap a local result with a sharding, in the group and with the origins of `split`."""
    return ShardPropagatingTensor.of(local, cut, split.wire, origins=split.origins)


def need_cut_argument(value: Any) -> ShardPropagatingTensor:
    """Return a sharded argument. Raise `NoRule` if it is a whole tensor."""
    if not isinstance(value, ShardPropagatingTensor):
        raise NoRule
    return value


def view_piece(x: ShardPropagatingTensor, sizes: list[int], func: Any = torch.reshape) -> ShardPropagatingTensor:
    """Return the tensor reshaped to `sizes`, which are those of the whole."""
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
        sizes = [math.prod(x.whole) // max(known, 1) if n == -1 else n for n in sizes]
    if math.prod(sizes) != math.prod(x.whole):
        raise RuntimeError(f"shape {sizes} is invalid for input of size {math.prod(x.whole)}")
    cut = reshape_cut(x.cut, x.whole, tuple(sizes))
    if isinstance(cut, IncompatibleReshape):
        raise NoRule(cut)
    listener = getattr(x.wire, "read_as", None)
    if listener is not None and cut.size != x.cut.size:
        listener(x.origins, cut.size)
    local = [cut.held(x.wire.rank) if d == cut.dim else n for d, n in enumerate(sizes)]
    return piece_like(x, func(x.local, local), cut)


@rule("view")
def _view(call: FunctionCall) -> Any:
    return view_piece(need_cut_argument(call["input"]), [*call["size"]], Tensor.view)


@rule("reshape")
def _reshape(call: FunctionCall) -> Any:
    return view_piece(need_cut_argument(call["input"]), [*call["shape"]])


@rule("view_as", "reshape_as")
def _view_as(call: FunctionCall) -> Any:
    return view_piece(need_cut_argument(call["input"]), list(call["other"].shape))


@rule("flatten")
def _flatten(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    start, end = (positive_dim(call[name], len(x.whole)) for name in ("start_dim", "end_dim"))
    return view_piece(x, [*x.whole[:start], math.prod(x.whole[start : end + 1]), *x.whole[end + 1 :]])


@rule("unflatten")
def _unflatten(call: FunctionCall) -> Any:
    x, sizes = need_cut_argument(call["input"]), list(call["sizes"])
    dim = positive_dim(call["dim"], len(x.whole))
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.whole[dim] // -math.prod(sizes)
    return view_piece(x, [*x.whole[:dim], *sizes, *x.whole[dim + 1 :]])


def _moved(x: ShardPropagatingTensor, order: list[int]) -> ShardPropagatingTensor:
    return piece_like(x, x.local.permute(order), x.cut.at(order.index(x.cut.dim)))


@rule("transpose", "swapaxes", "swapdims")
def _transpose(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    a, b = (positive_dim(call[name], len(x.whole)) for name in ("dim0", "dim1"))
    order = list(range(len(x.whole)))
    order[a], order[b] = order[b], order[a]
    return _moved(x, order)


@rule("t", ".T", ".mT")
def _t(call: FunctionCall) -> Any:
    x = need_cut_argument(call.args[0] if call.args else call["input"])
    last = len(x.whole) - 1
    if last < 1 or (last > 1 and call.name != ".mT"):
        raise NoRule
    return _moved(x, [*range(last - 1), last, last - 1])


@rule("permute")
def _permute(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    return _moved(x, [positive_dim(d, len(x.whole)) for d in call["dims"]])


@rule("movedim", "moveaxis")
def _movedim(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    marks = torch.empty([2 + d for d in range(len(x.whole))], device="meta")
    return _moved(x, [n - 2 for n in marks.movedim(call["source"], call["destination"]).shape])


@rule("unsqueeze")
def _unsqueeze(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    dim = positive_dim(call["dim"], len(x.whole) + 1)
    return piece_like(x, x.local.unsqueeze(dim), x.cut.at(x.cut.dim + (dim <= x.cut.dim)))


@rule("squeeze")
def _squeeze(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    asked = {positive_dim(d, len(x.whole)) for d in call.given.get("dim", range(len(x.whole)))}
    gone = sorted(d for d in asked if x.whole[d] == 1)
    if x.cut.dim in gone:
        raise NoRule
    local = x.local.squeeze(tuple(gone)) if gone else x.local
    return piece_like(x, local, x.cut.at(x.cut.dim - sum(d < x.cut.dim for d in gone)))


@rule("expand_as")
def _expand_as(call: FunctionCall) -> Any:
    return _expanded(need_cut_argument(call["input"]), list(call["other"].shape))


@rule("expand", "broadcast_to")
def _expand(call: FunctionCall) -> Any:
    return _expanded(need_cut_argument(call["input"]), [*call["size"]])


def _expanded(x: ShardPropagatingTensor, sizes: list[int]) -> ShardPropagatingTensor:
    at = x.cut.dim + len(sizes) - len(x.whole)
    if at < 0 or sizes[at] not in (-1, x.cut.size):
        raise NoRule
    sizes[at] = -1
    return piece_like(x, x.local.expand(sizes), x.cut.at(at))


@rule("repeat_interleave")
def _repeat_interleave(call: FunctionCall) -> Any:
    x, times, dim = need_cut_argument(call["input"]), call["repeats"], call["dim"]
    if not isinstance(times, int) or dim is None:
        raise NoRule
    dim = positive_dim(dim, len(x.whole))
    cut = x.cut.repeated(times) if dim == x.cut.dim else x.cut
    return piece_like(x, x.local.repeat_interleave(times, dim), cut)


@rule("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda",
      "zeros_like", "ones_like", "full_like", "requires_grad_", ".data")  # fmt: skip
def _same(call: FunctionCall) -> Any:
    x = next(value for value in call.values() if isinstance(value, ShardPropagatingTensor))
    if call.args[:1] != (x,) and call.kwargs.get("input") is not x:
        raise NoRule  # `whole.to(cut)`, `whole.type_as(cut)`
    made = call.replacing(lambda value: value.local if isinstance(value, ShardPropagatingTensor) else value)
    if not isinstance(made, Tensor):
        return made  # type() returns the name of the type
    return x if made is x.local else piece_like(x, made, x.cut)


@rule("cat", "concat", "concatenate")
def _cat(call: FunctionCall) -> Any:
    tensors = [t for t in call["tensors"] if t.dim() != 1 or len(t)]  # torch skips them too
    first = next(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    dim = positive_dim(call["dim"], len(first.whole))
    if any(isinstance(t, ShardPropagatingTensor) and t.cut.dim != first.cut.dim for t in tensors):
        raise NoRule
    wire, origins = wire_and_origins(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    if dim == first.cut.dim:
        if not all(isinstance(t, ShardPropagatingTensor) for t in tensors):
            raise NoRule
        sections = tuple(section for t in tensors for section in t.cut.sections)
        cut = DimSharding(dim=dim, sections=sections)
        return ShardPropagatingTensor.of(torch.cat([t.local for t in tensors], dim), cut, wire, origins=origins)
    return ShardPropagatingTensor.of(
        torch.cat([_piece(t, first) for t in tensors], dim), first.cut, wire, origins=origins
    )


@rule("stack")
def _stack(call: FunctionCall) -> Any:
    tensors = list(call["tensors"])
    first = next(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    dim = positive_dim(call["dim"], len(first.whole) + 1)
    wire, origins = wire_and_origins(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    cut = first.cut.at(first.cut.dim + (dim <= first.cut.dim))
    return ShardPropagatingTensor.of(torch.stack([_piece(t, first) for t in tensors], dim), cut, wire, origins=origins)


def _piece(tensor: Tensor, of: ShardPropagatingTensor) -> Tensor:
    if isinstance(tensor, ShardPropagatingTensor):
        if tensor.cut != of.cut or len(tensor.whole) != len(of.whole):
            raise NoRule
        return tensor.local
    if tensor.dim() != len(of.whole) or tensor.shape[of.cut.dim] != of.cut.size:
        raise NoRule
    return take_own(tensor, of.cut, of.wire)
