"""Sharding rules of elementwise functions, reductions, norms and dropout."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import (
    TensorParallelGroup,
    copy_to_parallel_region,
    reduce_from_parallel_region,
    slice_local,
)
from paceline.parallel.tensor_parallel.rules.views import positive_dim, require_sharded, wrap_like
from paceline.parallel.tensor_parallel.sharded_tensor import (
    FunctionCall,
    NoRule,
    ShardPropagatingTensor,
    common_group_and_origins,
    function_name,
    is_searching,
    local_operand,
    register_rule,
)
from paceline.parallel.tensor_parallel.sharding import DimSharding

BINARY = (
    "add sub mul div true_divide floor_divide remainder fmod pow rsub maximum minimum atan2 eq ne lt le gt ge "
    "logical_and logical_or bitwise_and bitwise_or"
)
UNARY = (
    "abs neg exp expm1 log log1p log2 sqrt rsqrt square reciprocal sin cos tan tanh sigmoid erf sign floor ceil round "
    "clamp clip clamp_min clamp_max nan_to_num isnan isinf isfinite relu relu6 gelu silu mish elu selu celu leaky_relu "
    "hardtanh hardswish hardsigmoid softplus softsign logsigmoid threshold tanhshrink positive logical_not bitwise_not "
    "erfc sinh cosh trunc frac"
)
TERNARY = "where masked_fill addcmul addcdiv lerp"
DUNDER = "add radd sub rsub mul rmul truediv rtruediv floordiv pow rpow mod neg pos abs eq ne lt le gt ge and or invert"


def _torch_names(names: Iterable[str]) -> list[str]:
    """Return the `__name__` of these functions: `__rtruediv__` is `__rdiv__`, `F.logsigmoid` is `log_sigmoid`."""
    resolved = [
        function_name(getattr(namespace, name))
        for name in names
        for namespace in (torch, Tensor, F)
        if hasattr(namespace, name)
    ]
    return list(dict.fromkeys(resolved))


_NAMES = [*BINARY.split(), *UNARY.split(), *TERNARY.split()]
ELEMENTWISE = _torch_names([*_NAMES, *(f"__{name}__" for name in DUNDER.split())])
IN_PLACE = _torch_names(
    [*(f"{name}_" for name in [*_NAMES, "zero", "fill", "copy"]), *(f"__i{name}__" for name in DUNDER.split())]
)


@register_rule(*ELEMENTWISE)
def apply_elementwise(call: FunctionCall) -> Any:
    """Apply the function to this rank's shard of each operand; an operand that is broadcast is used in full."""
    if call.kwargs.get("out") is not None or (call.name == "where" and len(call.values()) == 1):
        raise NoRule  # where(condition) returns indices of nonzero elements
    sharded_tensors = [value for value in call.values() if isinstance(value, ShardPropagatingTensor)]
    first_sharded, (group, origins) = sharded_tensors[0], common_group_and_origins(sharded_tensors)
    dim = first_sharded.sharding.dim - len(first_sharded.full_shape)
    result = call.call_with(lambda value: local_operand(value, like=first_sharded, dim=dim))
    in_place_target = next((tensor for tensor in sharded_tensors if tensor.local is result), None)  # `inplace=True`
    return (
        ShardPropagatingTensor.from_local(
            result, first_sharded.sharding.with_dim(result.dim() + dim), group, origins=origins
        )
        if in_place_target is None
        else in_place_target
    )


@register_rule(*IN_PLACE)
def _apply_in_place(call: FunctionCall) -> Any:
    """Apply an in-place function to the shards of the target and the operands; raise `NoRule` for a full target."""
    x = call.args[0] if call.args else call.kwargs.get("input")
    if not isinstance(x, ShardPropagatingTensor) or call.kwargs.get("out") is not None:
        raise NoRule
    dim = x.sharding.dim - len(x.full_shape)
    call.call_with(lambda value: local_operand(value, like=x, dim=dim))
    return x


def _reduced_dims(x: ShardPropagatingTensor, dim: Any) -> list[int]:
    """Return the non-negative dimensions that a function reduces; None means all."""
    dims = dim if isinstance(dim, tuple | list) else () if dim is None else (dim,)
    return [positive_dim(d, len(x.full_shape)) for d in dims] or list(range(len(x.full_shape)))


@register_rule("all", "amax", "amin", "any", "logsumexp", "linalg_vector_norm", "mean", "norm", "prod", "std", "sum",
               "var", "max", "min")  # fmt: skip
def _reduce(call: FunctionCall) -> Any:
    x = require_sharded(call["input"])
    if "other" in call.arguments:  # `max` and `min` of two tensors
        return apply_elementwise(call)
    dims = _reduced_dims(x, call.arguments.get("dim"))
    if x.sharding.dim in dims:
        return _reduce_sharded_dim(call, x, dims)
    num_removed = 0 if call.arguments.get("keepdim") else sum(d < x.sharding.dim for d in dims)
    return _apply_to_unsharded_dims(call, x, x.sharding.with_dim(x.sharding.dim - num_removed))


@register_rule("cumsum", "flip", "sort", "topk")
def _apply_along_dim(call: FunctionCall) -> Any:
    """Apply the function along a dimension that is not sharded."""
    x = require_sharded(call["input"])
    if x.sharding.dim in _reduced_dims(x, call["dims"] if call.name == "flip" else call["dim"]):
        raise NoRule
    return _apply_to_unsharded_dims(call, x, x.sharding)


def _apply_to_unsharded_dims(call: FunctionCall, x: ShardPropagatingTensor, sharding: DimSharding) -> Any:
    """Apply the function to the local shard of `x`; wrap each result with `sharding`."""
    result = call.call_with(lambda value: x.local if value is x else value)
    return (
        wrap_like(x, result, sharding)
        if isinstance(result, Tensor)
        else type(result)([wrap_like(x, part, sharding) for part in result])
    )


def _reduce_sharded_dim(call: FunctionCall, x: ShardPropagatingTensor, dims: list[int]) -> Any:
    """Reduce over the sharded dimension.

    `sum` and `mean` all-reduce the local sums; `all` and `any` all-reduce one byte per element of the result.
    """
    keepdim = call.arguments.get("keepdim", False)
    if call.name in ("all", "any"):
        local = x.local.bool() if call.name == "any" else ~x.local.bool()  # all(x) is computed as not any(not x)
        is_any = x.group.all_reduce_max(
            local.any(dims, keepdim).byte() if local.numel() else _any_of_empty(local, dims, keepdim)
        ).bool()
        return is_any if call.name == "any" else ~is_any
    if (
        call.name not in ("sum", "mean")
        or not x.local.is_floating_point()
        or (is_searching(x) and not _is_vector_per_sample(x))
    ):
        raise NoRule  # in a plan search, such a sum or mean is taken for a hand-written norm layer, which stays whole
    result_dtype = call["dtype"] or x.local.dtype
    compute_dtype = torch.float32 if result_dtype in (torch.float16, torch.bfloat16) else result_dtype
    total = reduce_from_parallel_region(torch.sum(x.local, dims, keepdim, dtype=compute_dtype), x.group)
    return (total if call.name == "sum" else total / math.prod(x.full_shape[d] for d in dims)).to(result_dtype)


def _is_vector_per_sample(x: ShardPropagatingTensor) -> bool:
    """Return whether all dimensions but the first and the sharded one have size 1, as in global response norm.

    A reduction over the sharded dimension then needs only a small all-reduce.
    """
    return len(x.full_shape) > 1 and all(n == 1 for d, n in enumerate(x.full_shape) if d not in (0, x.sharding.dim))


def _any_of_empty(local: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Return `any` of an empty shard, as bytes: False for every element of the result."""
    return local.sum(dims, keepdim).byte()


@register_rule("layer_norm", "rms_norm")
def _layer_norm(call: FunctionCall) -> Any:
    """Normalize over dimensions that are not sharded."""
    x = require_sharded(call["input"])
    if x.sharding.dim >= len(x.full_shape) - len(call["normalized_shape"]):
        raise NoRule
    if any(isinstance(call.arguments.get(name), ShardPropagatingTensor) for name in ("weight", "bias")):
        raise NoRule
    copied_inputs = {
        id(value): copy_to_parallel_region(value, x.group)
        for value in call.values()
        if isinstance(value, Tensor) and value is not x
    }
    result = call.call_with(lambda value: x.local if value is x else copied_inputs.get(id(value), value))
    return wrap_like(x, result, x.sharding)


@register_rule("dropout")
def _dropout(call: FunctionCall) -> Any:
    """Apply this rank's shard of the full mask, so that results and generator states are those of one process."""
    x, p = require_sharded(call["input"]), call["p"]
    if not call["training"] or p == 0.0:
        return x
    local_mask = local_dropout_mask(x.local, p, x.sharding, x.group)
    if call["inplace"]:
        x.local.mul_(local_mask)
        return x
    return wrap_like(x, x.local * local_mask, x.sharding)


def local_dropout_mask(local: Tensor, p: float, sharding: DimSharding, group: TensorParallelGroup) -> Tensor:
    """Return this rank's shard of a dropout mask, which is drawn for the full tensor in the tensor's memory order."""
    shape = [sharding.size if d == sharding.dim else n for d, n in enumerate(local.shape)]
    strides = local.stride()
    order = sorted(range(local.dim()), key=lambda d: (-strides[d], d)) if not local.is_contiguous() else None
    with torch.no_grad():
        if order is None:
            ones = torch.ones(shape, dtype=local.dtype, device=local.device)
        else:
            permuted = torch.ones([shape[d] for d in order], dtype=local.dtype, device=local.device)
            ones = permuted.permute([order.index(d) for d in range(local.dim())])
        return slice_local(F.dropout(ones, p), sharding, group)
