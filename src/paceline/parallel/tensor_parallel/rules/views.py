"""Sharding rules of views, copies and concatenations, whose results are sharded in the same way as their inputs."""

import math
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import take_local_shard
from paceline.parallel.tensor_parallel.sharded_tensor import (
    FunctionCall,
    NoRule,
    ShardPropagatingTensor,
    common_group_and_origins,
    register_rule,
)
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape, reshape_sharding


def positive_dim(dim: int, ndim: int) -> int:
    """Return the non-negative index of a dimension."""
    return dim + ndim if dim < 0 else dim


def wrap_like(like: ShardPropagatingTensor, local: Tensor, sharding: DimSharding) -> ShardPropagatingTensor:
    """Wrap a local result as sharded, with the group and the origins of `like`."""
    return ShardPropagatingTensor.from_local(local, sharding, like.group, origins=like.origins)


def require_sharded(value: Any) -> ShardPropagatingTensor:
    """Return the argument if it is sharded; otherwise raise `NoRule`."""
    if not isinstance(value, ShardPropagatingTensor):
        raise NoRule
    return value


def reshape_sharded(x: ShardPropagatingTensor, sizes: list[int], func: Any = torch.reshape) -> ShardPropagatingTensor:
    """Return the tensor reshaped to the full shape `sizes`."""
    if -1 in sizes:
        known_numel = math.prod(n for n in sizes if n != -1)
        sizes = [math.prod(x.full_shape) // max(known_numel, 1) if n == -1 else n for n in sizes]
    if math.prod(sizes) != math.prod(x.full_shape):
        raise RuntimeError(f"shape {sizes} is invalid for input of size {math.prod(x.full_shape)}")
    sharding = reshape_sharding(x.sharding, x.full_shape, tuple(sizes))
    if isinstance(sharding, IncompatibleReshape):
        raise NoRule(sharding)
    listener = getattr(x.group, "on_heads_viewed", None)
    if listener is not None and sharding.size != x.sharding.size:
        listener(x.origins, sharding.size)
    local = [-1 if d == sharding.dim else n for d, n in enumerate(sizes)]
    if not math.prod(sizes) or not sharding.local_size(x.group.rank):
        local[sharding.dim] = sharding.local_size(x.group.rank)
    return wrap_like(x, func(x.local, local), sharding)


@register_rule("view")
def _view(call: FunctionCall) -> Any:
    return reshape_sharded(require_sharded(call["input"]), [*call["size"]], Tensor.view)


@register_rule("reshape")
def _reshape(call: FunctionCall) -> Any:
    return reshape_sharded(require_sharded(call["input"]), [*call["shape"]])


@register_rule("view_as", "reshape_as")
def _view_as(call: FunctionCall) -> Any:
    return reshape_sharded(require_sharded(call["input"]), list(call["other"].shape))


@register_rule("flatten")
def _flatten(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    start, end = (positive_dim(call[name], len(x.full_shape)) for name in ("start_dim", "end_dim"))
    return reshape_sharded(
        x, [*x.full_shape[:start], math.prod(x.full_shape[start : end + 1]), *x.full_shape[end + 1 :]]
    )


@register_rule("unflatten")
def _unflatten(call: FunctionCall) -> Any:
    x, sizes = require_sharded(call["input"]), list(call["sizes"])
    dim = positive_dim(call["dim"], len(x.full_shape))
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.full_shape[dim] // -math.prod(sizes)
    return reshape_sharded(x, [*x.full_shape[:dim], *sizes, *x.full_shape[dim + 1 :]])


def _permute_dims(x: ShardPropagatingTensor, order: list[int]) -> ShardPropagatingTensor:
    return wrap_like(x, x.local.permute(order), x.sharding.with_dim(order.index(x.sharding.dim)))


@register_rule("transpose", "swapaxes", "swapdims")
def _transpose(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    a, b = (positive_dim(call[name], len(x.full_shape)) for name in ("dim0", "dim1"))
    order = list(range(len(x.full_shape)))
    order[a], order[b] = order[b], order[a]
    return _permute_dims(x, order)


@register_rule("t", ".T", ".mT")
def _transpose_matrix(call: FunctionCall) -> Any:
    x = require_sharded(call.args[0] if call.args else call["input"])
    last_dim = len(x.full_shape) - 1
    if last_dim < 1 or (last_dim > 1 and call.name != ".mT"):
        raise NoRule
    return _permute_dims(x, [*range(last_dim - 1), last_dim, last_dim - 1])


@register_rule("permute")
def _permute(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    return _permute_dims(x, [positive_dim(d, len(x.full_shape)) for d in call["dims"]])


@register_rule("movedim", "moveaxis")
def _movedim(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    dims = torch.empty([2 + d for d in range(len(x.full_shape))], device="meta")  # dimension d has size d + 2
    return _permute_dims(x, [size - 2 for size in dims.movedim(call["source"], call["destination"]).shape])


@register_rule("unsqueeze")
def _unsqueeze(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    dim = positive_dim(call["dim"], len(x.full_shape) + 1)
    return wrap_like(x, x.local.unsqueeze(dim), x.sharding.with_dim(x.sharding.dim + (dim <= x.sharding.dim)))


@register_rule("squeeze")
def _squeeze(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    dims = {positive_dim(d, len(x.full_shape)) for d in call.arguments.get("dim", range(len(x.full_shape)))}
    removed_dims = sorted(d for d in dims if x.full_shape[d] == 1)
    if x.sharding.dim in removed_dims:
        raise NoRule
    local = x.local.squeeze(tuple(removed_dims)) if removed_dims else x.local
    return wrap_like(x, local, x.sharding.with_dim(x.sharding.dim - sum(d < x.sharding.dim for d in removed_dims)))


@register_rule("expand_as")
def _expand_as(call: FunctionCall) -> Any:
    return _expand_to(require_sharded(call["input"]), list(call["other"].shape))


@register_rule("expand", "broadcast_to")
def _expand(call: FunctionCall) -> Any:
    return _expand_to(require_sharded(call["input"]), [*call["size"]])


def _expand_to(x: ShardPropagatingTensor, sizes: list[int]) -> ShardPropagatingTensor:
    dim = x.sharding.dim + len(sizes) - len(x.full_shape)
    if dim < 0 or sizes[dim] not in (-1, x.sharding.size):
        raise NoRule
    sizes[dim] = -1
    return wrap_like(x, x.local.expand(sizes), x.sharding.with_dim(dim))


@register_rule("repeat_interleave")
def _repeat_interleave(call: FunctionCall) -> Any:
    x, repeats, dim = require_sharded(call["input"]), call["repeats"], call["dim"]
    if not isinstance(repeats, int) or dim is None:
        raise NoRule
    dim = positive_dim(dim, len(x.full_shape))
    sharding = x.sharding.repeat_interleave(repeats) if dim == x.sharding.dim else x.sharding
    return wrap_like(x, x.local.repeat_interleave(repeats, dim), sharding)


@register_rule("contiguous", "clone", "detach", "to", "float", "double", "half", "bfloat16", "type", "type_as", "cpu",
               "cuda", "zeros_like", "ones_like", "full_like", "requires_grad_", ".data")  # fmt: skip
def _apply_locally(call: FunctionCall) -> Any:
    x = next(value for value in call.values() if isinstance(value, ShardPropagatingTensor))
    if call.args[:1] != (x,) and call.kwargs.get("input") is not x:
        raise NoRule  # the sharded tensor is not the input, as in `full.to(sharded)` and `full.type_as(sharded)`
    result = call.call_with(lambda value: value.local if isinstance(value, ShardPropagatingTensor) else value)
    if not isinstance(result, Tensor):
        return result  # type() returns the name of the type
    return x if result is x.local else wrap_like(x, result, x.sharding)


@register_rule("cat", "concat", "concatenate")
def _cat(call: FunctionCall) -> Any:
    tensors = [t for t in call["tensors"] if t.dim() != 1 or len(t)]  # torch skips empty vectors too
    first_sharded = next(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    dim = positive_dim(call["dim"], len(first_sharded.full_shape))
    if any(isinstance(t, ShardPropagatingTensor) and t.sharding.dim != first_sharded.sharding.dim for t in tensors):
        raise NoRule
    group, origins = common_group_and_origins(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    if dim == first_sharded.sharding.dim:
        if not all(isinstance(t, ShardPropagatingTensor) for t in tensors):
            raise NoRule
        sections = tuple(section for t in tensors for section in t.sharding.sections)
        sharding = DimSharding(dim=dim, sections=sections)
        return ShardPropagatingTensor.from_local(
            torch.cat([t.local for t in tensors], dim), sharding, group, origins=origins
        )
    return ShardPropagatingTensor.from_local(
        torch.cat([_matching_shard(t, first_sharded) for t in tensors], dim),
        first_sharded.sharding,
        group,
        origins=origins,
    )


@register_rule("stack")
def _stack(call: FunctionCall) -> Any:
    tensors = list(call["tensors"])
    first_sharded = next(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    dim = positive_dim(call["dim"], len(first_sharded.full_shape) + 1)
    group, origins = common_group_and_origins(t for t in tensors if isinstance(t, ShardPropagatingTensor))
    sharding = first_sharded.sharding.with_dim(first_sharded.sharding.dim + (dim <= first_sharded.sharding.dim))
    return ShardPropagatingTensor.from_local(
        torch.stack([_matching_shard(t, first_sharded) for t in tensors], dim), sharding, group, origins=origins
    )


def _matching_shard(tensor: Tensor, like: ShardPropagatingTensor) -> Tensor:
    """Return this rank's shard of a tensor with the sharding of `like`; raise `NoRule` if the shapes do not match."""
    if isinstance(tensor, ShardPropagatingTensor):
        if tensor.sharding != like.sharding or len(tensor.full_shape) != len(like.full_shape):
            raise NoRule
        return tensor.local
    if tensor.dim() != len(like.full_shape) or tensor.shape[like.sharding.dim] != like.sharding.size:
        raise NoRule
    return take_local_shard(tensor, like.sharding, like.group)
