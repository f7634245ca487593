"""Sharding rules of losses, softmax and argmax over a sharded vocabulary, without an all-gather of the logits.

The ranks all-reduce three numbers per row: the largest logit, the sum of exponentials and the target's logit
(Megatron-LM).
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.parallel.tensor_parallel.collectives import (
    TensorParallelGroup,
    copy_to_parallel_region,
    map_ranks_to_index,
    reduce_from_parallel_region,
    take_local_shard,
)
from paceline.parallel.tensor_parallel.logical.logical_shards import LogicalShards
from paceline.parallel.tensor_parallel.once_differentiable import once_differentiable
from paceline.parallel.tensor_parallel.rules.views import positive_dim, require_sharded, wrap_like
from paceline.parallel.tensor_parallel.sharded_tensor import FunctionCall, NoRule, ShardPropagatingTensor, register_rule


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, local: Tensor, dim: int, group: TensorParallelGroup) -> Tensor:
        max_logit = group.all_reduce_max(_local_max(local, dim))
        sum_exp = group.all_reduce((local - max_logit).exp_().sum(dim, keepdim=True))
        log_probs = local - max_logit - sum_exp.log_()
        ctx.save_for_backward(log_probs)
        ctx.dim, ctx.group = dim, group
        return log_probs

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        (log_probs,) = ctx.saved_tensors
        grad_sum = ctx.group.all_reduce(grad.sum(ctx.dim, keepdim=True))
        return grad - log_probs.exp() * grad_sum, None, None


class _ShardedCrossEntropy(torch.autograd.Function):
    """The cross-entropy of each row: minus the log-probability of its target; zero for ignored rows.

    Forward all-reduces the sum of exponentials and the target's logit together, and saves the softmax for backward.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        local: Tensor,
        local_index: Tensor,
        is_local: Tensor,
        is_counted: Tensor,
        dim: int,
        group: TensorParallelGroup,
    ) -> Tensor:
        max_logit = group.all_reduce_max(_local_max(local, dim))
        exp_logits = (local - max_logit).exp_()
        local_logit = local.gather(dim, local_index) - max_logit if local.shape[dim] else torch.zeros_like(max_logit)
        sum_exp, target_logit = group.all_reduce(
            torch.stack([exp_logits.sum(dim, keepdim=True), local_logit.masked_fill_(~is_local, 0.0)])
        )
        ctx.save_for_backward(exp_logits.div_(sum_exp), local_index, is_local, is_counted)
        ctx.dim = dim
        losses: Tensor = (sum_exp.log() - target_logit).masked_fill_(~is_counted, 0.0)
        return losses

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        softmax, local_index, is_local, is_counted = ctx.saved_tensors
        grad = grad.masked_fill(~is_counted, 0.0)
        local_grad = softmax * grad
        if local_grad.shape[ctx.dim]:
            local_grad.scatter_add_(ctx.dim, local_index, -grad.masked_fill(~is_local, 0.0))
        return local_grad, None, None, None, None, None


def _log_softmax_of_logical_shards(local: Tensor, dim: int, group: TensorParallelGroup) -> Tensor:
    """Compute `_LogSoftmax` on logical shards by functions with a gradient."""
    shifted = local - group.all_reduce_max(_local_max(local.detach(), dim))
    sum_exp = reduce_from_parallel_region(shifted.exp().sum(dim, keepdim=True), group)
    return shifted - copy_to_parallel_region(sum_exp.log(), group)


def _cross_entropy_of_logical_shards(
    local: Tensor, local_index: Tensor, is_local: Tensor, is_counted: Tensor, dim: int, group: TensorParallelGroup
) -> Tensor:
    """Compute `_ShardedCrossEntropy` on logical shards by functions with a gradient."""
    shifted = local - group.all_reduce_max(_local_max(local.detach(), dim))
    local_logit = shifted.gather(dim, local_index).masked_fill(~is_local, 0.0)
    sums = reduce_from_parallel_region(torch.stack([shifted.exp().sum(dim, keepdim=True), local_logit]), group)
    return (sums[0].log() - sums[1]).masked_fill(~is_counted, 0.0)


def _local_max(local: Tensor, dim: int) -> Tensor:
    """Return the maximum along a dimension that may be empty on this rank."""
    shape = [*local.shape[:dim], 1, *local.shape[dim + 1 :]]
    maximum: Tensor = local.amax(dim, keepdim=True) if local.shape[dim] else local.new_full(shape, float("-inf"))
    return maximum


def _compute_dtype(x: ShardPropagatingTensor) -> torch.dtype:
    """Return the dtype of the computation: float32 for float16 and bfloat16."""
    return torch.float32 if x.local.dtype in (torch.float16, torch.bfloat16) else x.local.dtype


def _result_dtype(x: ShardPropagatingTensor, *, is_loss: bool = True) -> torch.dtype:
    """Return the dtype of the function's result. Autocast makes it float32, except for softmax on CPU."""
    device = x.local.device.type
    has_autocast = torch.amp.is_autocast_available(device)  # "meta" has none
    uses_float32 = has_autocast and torch.is_autocast_enabled(device) and (is_loss or device != "cpu")
    return _compute_dtype(x) if uses_float32 else x.local.dtype


def _log_softmax(x: ShardPropagatingTensor, dtype: torch.dtype) -> Tensor:
    if isinstance(x.local, LogicalShards):
        return _log_softmax_of_logical_shards(x.local.to(dtype), x.sharding.dim, x.group)
    log_probs: Tensor = _LogSoftmax.apply(x.local.to(dtype), x.sharding.dim, x.group)  # type: ignore[no-untyped-call]
    return log_probs


@register_rule("softmax", "log_softmax")
def _softmax(call: FunctionCall) -> Any:
    x, dim, dtype = require_sharded(call["input"]), call["dim"], call["dtype"]
    if dim is None:
        raise NoRule
    if positive_dim(dim, len(x.full_shape)) != x.sharding.dim:
        return wrap_like(x, getattr(torch, call.name)(x.local, dim, dtype=dtype), x.sharding)
    result = _log_softmax(x, dtype or _compute_dtype(x))
    result = result if call.name == "log_softmax" else result.exp()
    return wrap_like(x, result.to(dtype or _result_dtype(x, is_loss=False)), x.sharding)


def _class_dim(x: ShardPropagatingTensor) -> int:
    """Return the class dimension: 1, or 0 without a batch. Raise `NoRule` if another dimension is sharded."""
    dim = 0 if len(x.full_shape) == 1 else 1
    if x.sharding.dim != dim or len(x.sharding.sections) > 1:
        raise NoRule
    return dim


@register_rule("cross_entropy")
def _cross_entropy(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    dim = _class_dim(x)
    target, compute_dtype = _validate_target(x, call, dim), _compute_dtype(x)
    label_smoothing, weight, reduction, ignore_index = (
        call[name] for name in ("label_smoothing", "weight", "reduction", "ignore_index")
    )
    is_counted = None if target.is_floating_point() else target != ignore_index
    if is_counted is not None and not label_smoothing:
        losses = _cross_entropy_per_row(
            wrap_like(x, x.local.to(compute_dtype), x.sharding), target, weight, ignore_index, dim
        )
        return _reduce_losses(losses, target, is_counted, weight, reduction).to(_result_dtype(x))
    log_probs = wrap_like(x, _log_softmax(x, compute_dtype), x.sharding)
    if is_counted is None:
        losses = _soft_target_losses(log_probs, target, weight, label_smoothing, dim)
    else:
        losses = _nll_per_row(log_probs, target, weight, ignore_index, dim)
        losses = losses * (1 - label_smoothing) - _sum_over_classes(log_probs, weight, dim).masked_fill(
            ~is_counted, 0.0
        ) * (label_smoothing / x.sharding.size)
    return _reduce_losses(losses, target, is_counted, weight, reduction).to(_result_dtype(x))


@register_rule("nll_loss")
def _nll_loss(call: FunctionCall) -> Any:
    x, weight, ignore_index = require_sharded(call["input"]), call["weight"], call["ignore_index"]
    dim, x = _class_dim(x), wrap_like(x, x.local.to(_result_dtype(x)), x.sharding)
    target = _validate_target(x, call, dim)
    losses = _nll_per_row(x, target, weight, ignore_index, dim)
    return _reduce_losses(losses, target, target != ignore_index, weight, call["reduction"])


def _validate_target(x: ShardPropagatingTensor, call: FunctionCall, dim: int) -> Tensor:
    """Return the target, class indices or probabilities. Raise `NoRule` if its shape or an option is not supported."""
    target: Tensor = call["target"]
    shape = x.full_shape if target.is_floating_point() else (*x.full_shape[:dim], *x.full_shape[dim + 1 :])
    is_deprecated_call = call["size_average"] is not None or call["reduce"] is not None
    is_supported = call["reduction"] in ("none", "sum", "mean") and not isinstance(
        call["weight"], ShardPropagatingTensor
    )
    if (
        isinstance(target, ShardPropagatingTensor)
        or is_deprecated_call
        or not is_supported
        or tuple(target.shape) != tuple(shape)
    ):
        raise NoRule
    return target.long() if target.dtype is torch.uint8 else target


def _cross_entropy_per_row(
    x: ShardPropagatingTensor, target: Tensor, weight: Tensor | None, ignore_index: int, dim: int
) -> Tensor:
    """Return the cross-entropy of each row of logits, times its class weight; zero if the target is ignored."""
    is_counted, is_local, local_index = _locate_targets(x, target, ignore_index)
    arguments = (x.local, local_index.unsqueeze(dim), is_local.unsqueeze(dim), is_counted.unsqueeze(dim), dim, x.group)
    if isinstance(x.local, LogicalShards):
        losses = _cross_entropy_of_logical_shards(*arguments).squeeze(dim)
    else:
        losses = _ShardedCrossEntropy.apply(*arguments).squeeze(dim)  # type: ignore[no-untyped-call]
    return losses if weight is None else losses * weight[torch.where(is_counted, target, 0)]


def _nll_per_row(
    log_probs: ShardPropagatingTensor, target: Tensor, weight: Tensor | None, ignore_index: int, dim: int
) -> Tensor:
    """Return the negative log-likelihood of each row, times its class weight; zero if the target is ignored."""
    is_counted, is_local, local_index = _locate_targets(log_probs, target, ignore_index)
    if log_probs.local.shape[dim]:
        target_log_probs = log_probs.local.gather(dim, local_index.unsqueeze(dim)).squeeze(dim)
    else:
        target_log_probs = log_probs.local.sum(dim)  # zeros: this rank holds no classes
    losses = -reduce_from_parallel_region(target_log_probs.masked_fill(~is_local, 0.0), log_probs.group)
    return losses if weight is None else losses * weight[torch.where(is_counted, target, 0)]


def _locate_targets(x: ShardPropagatingTensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mask of targets that are not ignored, the mask of targets on this rank, and their local indices.

    The local index of another rank's target is 0.
    """
    start = map_ranks_to_index(lambda rank: x.sharding.ranges(rank)[0][0], x.group)
    stop = map_ranks_to_index(lambda rank: x.sharding.ranges(rank)[0][1], x.group)
    is_counted = target != ignore_index
    is_out_of_range = is_counted & ((target < 0) | (target >= x.sharding.size))
    if target.device.type == "cpu" and bool(is_out_of_range.any()):
        raise IndexError(f"Target {int(target[is_out_of_range][0])} is out of bounds.")
    is_local = is_counted & (target >= start) & (target < stop)
    local_index = torch.where(is_local, target - start, 0)
    if target.device.type != "cpu":  # `gather` raises for such an index
        local_index = local_index.masked_fill(is_out_of_range, stop - start)
    return is_counted, is_local, local_index


def _sum_over_classes(log_probs: ShardPropagatingTensor, weight: Tensor | None, dim: int) -> Tensor:
    local = log_probs.local if weight is None else log_probs.local * _local_class_weights(weight, log_probs, dim)
    return reduce_from_parallel_region(local.sum(dim), log_probs.group)


def _local_class_weights(weight: Tensor, log_probs: ShardPropagatingTensor, dim: int) -> Tensor:
    local_weight = take_local_shard(weight, log_probs.sharding.with_dim(0), log_probs.group)
    return local_weight.view([-1 if d == dim else 1 for d in range(log_probs.local.dim())])


def _soft_target_losses(
    log_probs: ShardPropagatingTensor, target: Tensor, weight: Tensor | None, label_smoothing: float, dim: int
) -> Tensor:
    target_probs = take_local_shard(target, log_probs.sharding, log_probs.group)
    if label_smoothing:
        target_probs = target_probs * (1 - label_smoothing) + label_smoothing / log_probs.sharding.size
    local = log_probs.local * target_probs
    return -reduce_from_parallel_region(
        (local if weight is None else local * _local_class_weights(weight, log_probs, dim)).sum(dim), log_probs.group
    )


def _reduce_losses(
    losses: Tensor, target: Tensor, is_counted: Tensor | None, weight: Tensor | None, reduction: str
) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if is_counted is None:
        return losses.sum() / losses.numel()
    if weight is not None:
        return losses.sum() / weight[torch.where(is_counted, target, 0)].masked_fill(~is_counted, 0.0).sum()
    return losses.sum() / is_counted.sum()


@register_rule("argmax")
def _argmax(call: FunctionCall) -> Any:
    x, dim, keepdim = require_sharded(call["input"]), call["dim"], call["keepdim"]
    if dim is None:
        raise NoRule
    dim = positive_dim(dim, len(x.full_shape))
    if dim != x.sharding.dim:
        return wrap_like(
            x,
            x.local.argmax(dim, keepdim),
            x.sharding.with_dim(x.sharding.dim - (not keepdim and dim < x.sharding.dim)),
        )
    if len(x.sharding.sections) > 1 or min(x.sharding.local_size(rank) for rank in range(x.group.size)) == 0:
        raise NoRule
    with torch.no_grad():
        local = x.local.detach()
        local_max, local_index = local.max(dim, keepdim=True)
        global_max = x.group.all_reduce_max(local_max.clone())
        start = map_ranks_to_index(lambda rank: x.sharding.ranges(rank)[0][0], x.group)
        candidate = torch.where(local_max == global_max, local_index + start, x.sharding.size)
        index = -x.group.all_reduce_max(-candidate)
    return index if keepdim else index.squeeze(dim)
