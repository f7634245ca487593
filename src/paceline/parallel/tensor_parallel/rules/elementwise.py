"""Sharding rules of elementwise functions, reductions, norms and dropout."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import TensorParallelGroup, copy_in, piece_of, reduce_out
from paceline.parallel.tensor_parallel.rules.views import need_cut_argument, piece_like, positive_dim
from paceline.parallel.tensor_parallel.sharded_tensor import (
    FunctionCall,
    NoRule,
    ShardPropagatingTensor,
    is_searching,
    name_of,
    operand,
    rule,
    wire_and_origins,
)
from paceline.parallel.tensor_parallel.sharding import DimSharding

BINARY = "add sub mul div true_divide floor_divide remainder fmod pow rsub maximum minimum atan2 eq ne lt le gt ge"
UNARY = (
    "abs neg exp expm1 log log1p log2 sqrt rsqrt square reciprocal sin cos tan tanh sigmoid erf sign floor ceil round "
    "clamp clip clamp_min clamp_max nan_to_num isnan isinf isfinite relu relu6 gelu silu mish elu selu celu leaky_relu "
    "hardtanh hardswish hardsigmoid softplus softsign logsigmoid threshold tanhshrink positive logical_not bitwise_not "
    "masked_fill where addcmul addcdiv lerp logical_and logical_or bitwise_and bitwise_or erfc sinh cosh trunc frac"
)
DUNDER = "add radd sub rsub mul rmul truediv rtruediv floordiv pow rpow mod neg pos abs eq ne lt le gt ge and or invert"


def _names(names: Iterable[str]) -> list[str]:
    """Return torch's own names of these functions: `__rtruediv__` is `__rdiv__`, `F.logsigmoid` is `log_sigmoid`."""
    found = [name_of(getattr(place, name)) for name in names for place in (torch, Tensor, F) if hasattr(place, name)]
    return list(dict.fromkeys(found))


ELEMENTWISE = _names([*BINARY.split(), *UNARY.split(), *(f"__{name}__" for name in DUNDER.split())])
WRITING = _names(
    [*(f"{name}_" for name in [*BINARY.split(), *UNARY.split(), "zero", "fill", "copy"])]
    + [f"__i{name}__" for name in DUNDER.split()]
)


@rule(*ELEMENTWISE)
def elementwise(call: FunctionCall) -> Any:
    """Apply the function to this rank's piece of every operand; operands that broadcast are read whole."""
    if call.kwargs.get("out") is not None or (call.name == "where" and len(call.values()) == 1):
        raise NoRule  # where(condition) returns indices of nonzero elements
    splits = [value for value in call.values() if isinstance(value, ShardPropagatingTensor)]
    first, (wire, origins) = splits[0], wire_and_origins(splits)
    dim = first.cut.dim - len(first.whole)
    made = call.replacing(lambda value: operand(value, of=first, dim=dim))
    written = next((split for split in splits if split.local is made), None)  # `inplace=True`
    return (
        ShardPropagatingTensor.of(made, first.cut.at(made.dim() + dim), wire, origins=origins)
        if written is None
        else written
    )


@rule(*WRITING)
def _in_place(call: FunctionCall) -> Any:
    """Write in place into a shard from the operands' pieces; raise `NoRule` for a whole target."""
    x = call.args[0] if call.args else call.kwargs.get("input")
    if not isinstance(x, ShardPropagatingTensor) or call.kwargs.get("out") is not None:
        raise NoRule
    dim = x.cut.dim - len(x.whole)
    call.replacing(lambda value: operand(value, of=x, dim=dim))
    return x


def _dims(x: ShardPropagatingTensor, given: Any) -> list[int]:
    """Return the dimensions that a function reduces, counted from the front; None means all."""
    asked = given if isinstance(given, tuple | list) else () if given is None else (given,)
    return [positive_dim(d, len(x.whole)) for d in asked] or list(range(len(x.whole)))


@rule("all", "amax", "amin", "any", "logsumexp", "linalg_vector_norm", "mean", "norm", "prod", "std", "sum", "var",
      "max", "min")  # fmt: skip
def _reduce(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    if "other" in call.given:
        return elementwise(call)
    dims = _dims(x, call.given.get("dim"))
    if x.cut.dim in dims:
        return _over_the_cut(call, x, dims)
    gone = 0 if call.given.get("keepdim") else sum(d < x.cut.dim for d in dims)
    return _along_others(call, x, x.cut.at(x.cut.dim - gone))


@rule("cumsum", "flip", "sort", "topk")
def _along(call: FunctionCall) -> Any:
    """Apply the function along a dimension that is not sharded."""
    x = need_cut_argument(call["input"])
    if x.cut.dim in _dims(x, call["dims"] if call.name == "flip" else call["dim"]):
        raise NoRule
    return _along_others(call, x, x.cut)


def _along_others(call: FunctionCall, x: ShardPropagatingTensor, cut: DimSharding) -> Any:
    made = call.replacing(lambda value: x.local if value is x else value)
    return (
        piece_like(x, made, cut)
        if isinstance(made, Tensor)
        else type(made)([piece_like(x, part, cut) for part in made])
    )


def _over_the_cut(call: FunctionCall, x: ShardPropagatingTensor, dims: list[int]) -> Any:
    """Reduce over the sharded dimension.

    Sums are all-reduced, and a mean is a sum that is divided; `all` and `any` send one number per result.
    """
    keep = call.given.get("keepdim", False)
    if call.name in ("all", "any"):
        own = x.local.bool() if call.name == "any" else ~x.local.bool()
        found = x.wire.largest(own.any(dims, keep).byte() if own.numel() else _none_of(own, dims, keep)).bool()
        return found if call.name == "any" else ~found
    if (
        call.name not in ("sum", "mean")
        or not x.local.is_floating_point()
        or (is_searching(x) and not _is_one_vector(x))
    ):
        raise NoRule  # a plan does not shard a dimension that the next norm sums over
    asked = call["dtype"] or x.local.dtype
    wide = torch.float32 if asked in (torch.float16, torch.bfloat16) else asked
    total = reduce_out(torch.sum(x.local, dims, keep, dtype=wide), x.wire)
    return (total if call.name == "sum" else total / math.prod(x.whole[d] for d in dims)).to(asked)


def _is_one_vector(x: ShardPropagatingTensor) -> bool:
    """Return whether the tensor is one vector per sample, as in global response norm: its sum is a few numbers."""
    return len(x.whole) > 1 and all(n == 1 for d, n in enumerate(x.whole) if d not in (0, x.cut.dim))


def _none_of(own: Tensor, dims: list[int], keep: bool) -> Tensor:
    """Return zeros, for a rank that holds nothing of the dimension."""
    return own.sum(dims, keep).byte()


@rule("layer_norm", "rms_norm")
def _norm(call: FunctionCall) -> Any:
    x = need_cut_argument(call["input"])
    if x.cut.dim >= len(x.whole) - len(call["normalized_shape"]):
        raise NoRule
    if any(isinstance(call.given.get(name), ShardPropagatingTensor) for name in ("weight", "bias")):
        raise NoRule
    read = {
        id(value): copy_in(value, x.wire) for value in call.values() if isinstance(value, Tensor) and value is not x
    }
    made = call.replacing(lambda value: x.local if value is x else read.get(id(value), value))
    return piece_like(x, made, x.cut)


@rule("dropout")
def _dropout(call: FunctionCall) -> Any:
    """Drop with this rank's piece of the whole tensor's mask: equal to one process, and the generators stay in step."""
    x, p = need_cut_argument(call["input"]), call["p"]
    if not call["training"] or p == 0.0:
        return x
    drawn = own_draws(x.local, p, x.cut, x.wire)
    if call["inplace"]:
        x.local.mul_(drawn)
        return x
    return piece_like(x, x.local * drawn, x.cut)


def own_draws(local: Tensor, p: float, cut: DimSharding, wire: TensorParallelGroup) -> Tensor:
    """Return this rank's piece of a dropout mask that is drawn for the whole tensor, in its memory order."""
    shape = [cut.size if d == cut.dim else n for d, n in enumerate(local.shape)]
    strides = local.stride()
    order = sorted(range(local.dim()), key=lambda d: (-strides[d], d)) if not local.is_contiguous() else None
    with torch.no_grad():
        if order is None:
            ones = torch.ones(shape, dtype=local.dtype, device=local.device)
        else:
            laid = torch.ones([shape[d] for d in order], dtype=local.dtype, device=local.device)
            ones = laid.permute([order.index(d) for d in range(local.dim())])
        return piece_of(F.dropout(ones, p), cut, wire.rank)
