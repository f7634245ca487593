"""Sharding rules of losses, softmax and argmax over a sharded vocabulary, without gathering the logits.

Each rank sends two numbers per row (its largest logit, its sum of exponentials), and the target's (Megatron-LM).
"""

from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import TensorParallelGroup, reduce_out, take_own
from paceline.parallel.tensor_parallel.once_differentiable import once
from paceline.parallel.tensor_parallel.rules.views import need_cut_argument, piece_like, positive_dim
from paceline.parallel.tensor_parallel.sharded_tensor import FunctionCall, NoRule, ShardPropagatingTensor, rule


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, wire: TensorParallelGroup) -> Tensor:
        top = wire.largest(_largest(local, dim))
        total = wire.total((local - top).exp_().sum(dim, keepdim=True))
        found = local - top - total.log_()
        ctx.save_for_backward(found)
        ctx.dim, ctx.wire = dim, wire
        return found

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        (found,) = ctx.saved_tensors
        total = ctx.wire.total(grad.sum(ctx.dim, keepdim=True))
        return grad - found.exp() * total, None, None


class _EntropyOfClass(torch.autograd.Function):
    """The cross-entropy of each row: minus the log-probability of its target; zero for ignored rows.

    It sends one message for both numbers of a row, and keeps one copy of the logits (their softmax) for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, own: Tensor, mine: Tensor, kept: Tensor, dim: int, wire: TensorParallelGroup
    ) -> Tensor:
        top = wire.largest(_largest(local, dim))
        shares = (local - top).exp_()
        logit = local.gather(dim, own) - top if local.shape[dim] else torch.zeros_like(top)
        total, found = wire.total(torch.stack([shares.sum(dim, keepdim=True), logit.masked_fill_(~mine, 0.0)]))
        ctx.save_for_backward(shares.div_(total), own, mine, kept)
        ctx.dim = dim
        losses: Tensor = (total.log() - found).masked_fill_(~kept, 0.0)
        return losses

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        shares, own, mine, kept = ctx.saved_tensors
        grad = grad.masked_fill(~kept, 0.0)
        found = shares * grad
        if found.shape[ctx.dim]:
            found.scatter_add_(ctx.dim, own, -grad.masked_fill(~mine, 0.0))
        return found, None, None, None, None, None


def _largest(local: Tensor, dim: int) -> Tensor:
    """Return the maximum along a dimension that may be empty on this rank."""
    shape = [*local.shape[:dim], 1, *local.shape[dim + 1 :]]
    top: Tensor = local.amax(dim, keepdim=True) if local.shape[dim] else local.new_full(shape, float("-inf"))
    return top


def _wide(x: ShardPropagatingTensor) -> torch.dtype:
    """Return the dtype of the computation: float32 for float16 and bfloat16."""
    return torch.float32 if x.local.dtype in (torch.float16, torch.bfloat16) else x.local.dtype


def _given(x: ShardPropagatingTensor, *, is_loss: bool = True) -> torch.dtype:
    """Return torch's dtype for such a result: float32 inside autocast (on CPU for a loss only)."""
    device = x.local.device.type
    has_autocast = torch.amp.is_autocast_available(device)  # "meta" has none
    raised = has_autocast and torch.is_autocast_enabled(device) and (is_loss or device != "cpu")
    return _wide(x) if raised else x.local.dtype


def _log_softmax(x: ShardPropagatingTensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = _LogSoftmax.apply(x.local.to(dtype), x.cut.dim, x.wire)  # type: ignore[no-untyped-call]
    return found


@rule("softmax", "log_softmax")
def _softmax(call: FunctionCall) -> Any:
    x, dim, dtype = need_cut_argument(call["input"]), call["dim"], call["dtype"]
    if dim is None:
        raise NoRule
    if positive_dim(dim, len(x.whole)) != x.cut.dim:
        return piece_like(x, getattr(torch, call.name)(x.local, dim, dtype=dtype), x.cut)
    found = _log_softmax(x, dtype or _wide(x))
    found = found if call.name == "log_softmax" else found.exp()
    return piece_like(x, found.to(dtype or _given(x, is_loss=False)), x.cut)


def _classes(x: ShardPropagatingTensor) -> int:
    """Return the dimension of the classes: 1, or 0 without a batch."""
    dim = 0 if len(x.whole) == 1 else 1
    if x.cut.dim != dim or len(x.cut.sections) > 1:
        raise NoRule
    return dim


@rule("cross_entropy")
def _cross_entropy(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    dim = _classes(x)
    target, wide = _target(x, call, dim), _wide(x)
    smooth, weight, reduction, ignored = (
        call[name] for name in ("label_smoothing", "weight", "reduction", "ignore_index")
    )
    kept = None if target.is_floating_point() else target != ignored
    if kept is not None and not smooth:
        found = _of_class(piece_like(x, x.local.to(wide), x.cut), target, weight, ignored, dim)
        return _reduced(found, target, kept, weight, reduction).to(_given(x))
    logs = piece_like(x, _log_softmax(x, wide), x.cut)
    if kept is None:
        found = _against_shares(logs, target, weight, smooth, dim)
    else:
        found = _picked(logs, target, weight, ignored, dim)
        found = found * (1 - smooth) - _spread(logs, weight, dim).masked_fill(~kept, 0.0) * (smooth / x.cut.size)
    return _reduced(found, target, kept, weight, reduction).to(_given(x))


@rule("nll_loss")
def _nll(call: FunctionCall) -> Any:
    x, weight, ignored = need_cut_argument(call["input"]), call["weight"], call["ignore_index"]
    dim, x = _classes(x), piece_like(x, x.local.to(_given(x)), x.cut)
    target = _target(x, call, dim)
    found = _picked(x, target, weight, ignored, dim)
    return _reduced(found, target, target != ignored, weight, call["reduction"])


def _target(x: ShardPropagatingTensor, call: FunctionCall, dim: int) -> Tensor:
    """Return the target, class indices or probabilities, if its shape fits. Raises `NoRule` for anything else."""
    target: Tensor = call["target"]
    shape = x.whole if target.is_floating_point() else (*x.whole[:dim], *x.whole[dim + 1 :])
    is_old = call["size_average"] is not None or call["reduce"] is not None
    known = call["reduction"] in ("none", "sum", "mean") and not isinstance(call["weight"], ShardPropagatingTensor)
    if isinstance(target, ShardPropagatingTensor) or is_old or not known or tuple(target.shape) != tuple(shape):
        raise NoRule
    return target.long() if target.dtype is torch.uint8 else target


def _of_class(x: ShardPropagatingTensor, target: Tensor, weight: Tensor | None, ignored: int, dim: int) -> Tensor:
    """Return each row's loss from logits, times its class weight; zero if the target is ignored."""
    kept, mine, own = _places(x, target, ignored)
    given = (x.local, own.unsqueeze(dim), mine.unsqueeze(dim), kept.unsqueeze(dim), dim, x.wire)
    found: Tensor = _EntropyOfClass.apply(*given).squeeze(dim)  # type: ignore[no-untyped-call]
    return found if weight is None else found * weight[torch.where(kept, target, 0)]


def _picked(logs: ShardPropagatingTensor, target: Tensor, weight: Tensor | None, ignored: int, dim: int) -> Tensor:
    """Return minus the target's log-probability, times its class weight; zero if the target is ignored."""
    kept, mine, index = _places(logs, target, ignored)
    if logs.local.shape[dim]:
        own = logs.local.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    else:
        own = logs.local.sum(dim)
    found = -reduce_out(own.masked_fill(~mine, 0.0), logs.wire)
    return found if weight is None else found * weight[torch.where(kept, target, 0)]


def _places(x: ShardPropagatingTensor, target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return masks of the targets that count and of those on this rank, and their local indices (0 for the others)."""
    start, stop = x.cut.ranges(x.wire.rank)[0]
    kept = target != ignored
    outside = kept & ((target < 0) | (target >= x.cut.size))
    if target.device.type == "cpu" and bool(outside.any()):
        raise IndexError(f"Target {int(target[outside][0])} is out of bounds.")
    mine = kept & (target >= start) & (target < stop)
    own = torch.where(mine, target - start, 0)
    return kept, mine, own if target.device.type == "cpu" else own.masked_fill(outside, stop - start)  # gather raises


def _spread(logs: ShardPropagatingTensor, weight: Tensor | None, dim: int) -> Tensor:
    local = logs.local if weight is None else logs.local * _along(weight, logs, dim)
    return reduce_out(local.sum(dim), logs.wire)


def _along(weight: Tensor, logs: ShardPropagatingTensor, dim: int) -> Tensor:
    own = take_own(weight, logs.cut.at(0), logs.wire)
    return own.view([-1 if d == dim else 1 for d in range(logs.local.dim())])


def _against_shares(
    logs: ShardPropagatingTensor, target: Tensor, weight: Tensor | None, smooth: float, dim: int
) -> Tensor:
    shares = take_own(target, logs.cut, logs.wire)
    if smooth:
        shares = shares * (1 - smooth) + smooth / logs.cut.size
    local = logs.local * shares
    return -reduce_out((local if weight is None else local * _along(weight, logs, dim)).sum(dim), logs.wire)


def _reduced(found: Tensor, target: Tensor, kept: Tensor | None, weight: Tensor | None, reduction: str) -> Tensor:
    if reduction == "none":
        return found
    if reduction == "sum":
        return found.sum()
    if kept is None:
        return found.sum() / found.numel()
    if weight is not None:
        return found.sum() / weight[torch.where(kept, target, 0)].masked_fill(~kept, 0.0).sum()
    return found.sum() / kept.sum()


@rule("argmax")
def _argmax(call: FunctionCall) -> Any:
    x, dim, keep = need_cut_argument(call["input"]), call["dim"], call["keepdim"]
    if dim is None:
        raise NoRule
    dim = positive_dim(dim, len(x.whole))
    if dim != x.cut.dim:
        return piece_like(x, x.local.argmax(dim, keep), x.cut.at(x.cut.dim - (not keep and dim < x.cut.dim)))
    if len(x.cut.sections) > 1 or min(x.cut.held(rank) for rank in range(x.wire.size)) == 0:
        raise NoRule
    with torch.no_grad():
        local = x.local.detach()
        best, at = local.max(dim, keepdim=True)
        top = x.wire.largest(best.clone())
        place = torch.where(best == top, at + x.cut.ranges(x.wire.rank)[0][0], x.cut.size)
        first = -x.wire.largest(-place)
    return first if keep else first.squeeze(dim)
