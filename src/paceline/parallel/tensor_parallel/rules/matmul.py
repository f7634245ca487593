"""Sharding rules of matmuls, embedding and attention.

If the contracted dimension is sharded, each rank computes a partial sum, and an all-reduce adds the partial sums. If
another dimension is sharded, the result has the same sharding. A `linear` with a weight that is sharded along dimension
0 is Megatron-LM's column-parallel layer. With a weight that is sharded along dimension 1, it is the row-parallel layer;
its bias is added once, after the all-reduce.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import (
    TensorParallelGroup,
    copy_to_parallel_region,
    map_ranks,
    map_ranks_to_index,
    reduce_from_parallel_region,
    reduce_scatter_partials,
    take_local_shard,
)
from paceline.parallel.tensor_parallel.logical.logical_shards import call_with_values
from paceline.parallel.tensor_parallel.rules.elementwise import local_dropout_mask
from paceline.parallel.tensor_parallel.rules.views import positive_dim, wrap_like
from paceline.parallel.tensor_parallel.sharded_tensor import (
    FunctionCall,
    NoRule,
    ShardPropagatingTensor,
    apply_to_full_tensors,
    common_group_and_origins,
    find_sharded_tensors,
    local_operand,
    record_all_gather,
    register_rule,
)
from paceline.parallel.tensor_parallel.sharding import DimSharding, shard_evenly
from paceline.torch_internals.function_signatures import bind_arguments

AttentionFunction = Callable[..., Tensor]
"""Attention on this rank's heads; `sharded_query` are the sharded queries, or None if this rank has all heads."""


def sum_partials(partial: Tensor, group: TensorParallelGroup) -> Any:
    """Add the partial sums of all ranks; with sequence parallelism each rank keeps its shard of the sequence."""
    if group.sequence and partial.dim() == 3 and partial.shape[1] >= group.size:
        sharding = shard_evenly(partial.shape[1], ranks=group.size, dim=1)
        return ShardPropagatingTensor.from_local(reduce_scatter_partials(partial, sharding, group), sharding, group)
    return reduce_from_parallel_region(partial, group)


def read_full_operand(x: Any, group: TensorParallelGroup) -> Tensor:
    """Return the full tensor of an operand that a sharded matmul reads.

    Each rank computes only a part of the operand's gradient; backward sums these parts over the ranks.
    """
    if not isinstance(x, ShardPropagatingTensor):
        return copy_to_parallel_region(x, group)
    if x.sharding.dim != len(x.full_shape) - 2 or not group.sequence:
        record_all_gather(x, "a matmul that reads the full tensor")
    return x.full_tensor(has_partial_grad=True)


def take_matching_shard(x: Any, sharding: DimSharding, dim: int, group: TensorParallelGroup) -> Tensor:
    """Return this rank's shard of an operand whose dimension `dim` (negative) is sharded like `sharding`."""
    if isinstance(x, ShardPropagatingTensor):
        if x.sharding.sections == sharding.sections and x.sharding.dim - len(x.full_shape) == dim:
            return x.local
        record_all_gather(x, "a matmul that reads it with another sharding")
        x = x.full_tensor()
    return take_local_shard(x, sharding.with_dim(x.dim() + dim), group)


@register_rule("linear")
def _linear(call: FunctionCall) -> Any:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    group, _ = common_group_and_origins(t for t in (x, weight, bias) if isinstance(t, ShardPropagatingTensor))
    if isinstance(weight, ShardPropagatingTensor) and weight.sharding.dim == 0:
        local_bias = None if bias is None else take_matching_shard(bias, weight.sharding, -1, group)
        output = F.linear(read_full_operand(x, group), weight.local, local_bias)
        return ShardPropagatingTensor.from_local(
            output, weight.sharding.with_dim(output.dim() - 1), group, origins=weight.origins
        )
    if isinstance(weight, ShardPropagatingTensor):
        if isinstance(bias, ShardPropagatingTensor):
            raise NoRule
        partial = F.linear(take_matching_shard(x, weight.sharding, -1, group), weight.local)
        total = sum_partials(partial, group)  # under autocast its dtype differs from that of the bias
        return total if bias is None else total + bias.to(total.dtype)
    if (
        not isinstance(x, ShardPropagatingTensor)
        or isinstance(bias, ShardPropagatingTensor)
        or x.sharding.dim == len(x.full_shape) - 1
    ):
        raise NoRule
    local_bias = None if bias is None else copy_to_parallel_region(bias, group)
    return wrap_like(x, F.linear(x.local, copy_to_parallel_region(weight, group), local_bias), x.sharding)


@register_rule("matmul", "__matmul__", "__rmatmul__", "mm", "bmm")
def _matmul(call: FunctionCall) -> Any:
    a, b = call["input"], call["mat2" if call.name in ("mm", "bmm") else "other"]
    if (
        a.dim() < 2
        or b.dim() < 2
        or (call.name in ("mm", "bmm") and (a.dim(), b.dim()) != (2 + (call.name == "bmm"),) * 2)
    ):
        raise NoRule
    group, origins = common_group_and_origins(t for t in (a, b) if isinstance(t, ShardPropagatingTensor))
    if _negative_sharded_dim(a) == -1 or _negative_sharded_dim(b) == -2:
        sharding = a.sharding if _negative_sharded_dim(a) == -1 else b.sharding
        return reduce_from_parallel_region(
            take_matching_shard(a, sharding, -1, group) @ take_matching_shard(b, sharding, -2, group), group
        )
    if _negative_sharded_dim(b) == -1:
        output = read_full_operand(a, group) @ b.local
        return ShardPropagatingTensor.from_local(output, b.sharding.with_dim(output.dim() - 1), group, origins=origins)
    if _negative_sharded_dim(a) == -2:
        output = a.local @ read_full_operand(b, group)
        return ShardPropagatingTensor.from_local(output, a.sharding.with_dim(output.dim() - 2), group, origins=origins)
    first_sharded = a if isinstance(a, ShardPropagatingTensor) else b
    dim = first_sharded.sharding.dim - len(first_sharded.full_shape)
    output = local_operand(a, like=first_sharded, dim=dim) @ local_operand(b, like=first_sharded, dim=dim)
    return ShardPropagatingTensor.from_local(
        output, first_sharded.sharding.with_dim(output.dim() + dim), group, origins=origins
    )


def _negative_sharded_dim(x: Any) -> int:
    """Return the sharded dimension, counted from the end (negative), or 0 for a full operand."""
    return x.sharding.dim - len(x.full_shape) if isinstance(x, ShardPropagatingTensor) else 0


@register_rule("addmm")
def _addmm(call: FunctionCall) -> Any:
    bias, a, b = call["input"], call["mat1"], call["mat2"]
    if call["beta"] != 1 or call["alpha"] != 1:
        raise NoRule
    if not (isinstance(b, ShardPropagatingTensor) and _negative_sharded_dim(b) == -1):
        output = torch.matmul(a, b)
        return output + bias.to(output.dtype)
    local_bias = take_matching_shard(bias, b.sharding, -1, b.group)
    return ShardPropagatingTensor.from_local(
        torch.addmm(local_bias, read_full_operand(a, b.group), b.local), b.sharding, b.group, origins=b.origins
    )


@register_rule("einsum")
def _einsum(call: FunctionCall) -> Any:
    equation, operands = call["equation"], call["operands"]
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise NoRule
    inputs, output_term = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        raise NoRule
    position, first_sharded = next((n, t) for n, t in enumerate(operands) if isinstance(t, ShardPropagatingTensor))
    sharded_letter = terms[position][first_sharded.sharding.dim]
    if any(term.count(sharded_letter) > 1
           or (sharded_letter in term and value.shape[term.index(sharded_letter)] != first_sharded.sharding.size)
           for term, value in zip(terms, operands, strict=True)):  # fmt: skip
        raise NoRule  # a diagonal, or a size of 1 that broadcasts
    local_operands = []
    for term, value in zip(terms, operands, strict=True):
        if sharded_letter in term:
            local_operands.append(
                take_matching_shard(
                    value, first_sharded.sharding, term.index(sharded_letter) - len(term), first_sharded.group
                )
            )
        else:
            local_operands.append(read_full_operand(value, first_sharded.group))
    output = torch.einsum(equation, *local_operands)
    group, origins = common_group_and_origins(t for t in operands if isinstance(t, ShardPropagatingTensor))
    if sharded_letter not in output_term:
        return reduce_from_parallel_region(output, group)
    return ShardPropagatingTensor.from_local(
        output, first_sharded.sharding.with_dim(output_term.index(sharded_letter)), group, origins=origins
    )


@register_rule("embedding")
def _embedding(call: FunctionCall) -> Any:
    """Look up the rows that this rank holds. The sum over ranks is exact, because all other ranks add zero."""
    ids, weight, padding = call["input"], call["weight"], call["padding_idx"]
    if (
        not isinstance(weight, ShardPropagatingTensor)
        or isinstance(ids, ShardPropagatingTensor)
        or call["max_norm"] is not None
        or call["sparse"]
    ):
        raise NoRule
    if call["scale_grad_by_freq"]:
        raise NoRule
    if weight.sharding.dim == 1:
        output = F.embedding(ids, weight.local, padding)
        return ShardPropagatingTensor.from_local(
            output, weight.sharding.with_dim(output.dim() - 1), weight.group, origins=weight.origins
        )
    if len(weight.sharding.sections) > 1:
        raise NoRule
    sharding, group = weight.sharding, weight.group
    start = map_ranks_to_index(lambda rank: sharding.ranges(rank)[0][0], group)
    stop = map_ranks_to_index(lambda rank: sharding.ranges(rank)[0][1], group)
    is_remote = (ids < start) | (ids >= stop)
    _check_ids(ids, weight.sharding.size)
    local_ids = torch.where(is_remote, 0, ids - start)
    local_padding = None if padding is None else positive_dim(padding, sharding.size)
    if local_padding is not None:
        local_padding = map_ranks(partial(_index_in_range, local_padding, sharding), group)
    rows = call_with_values(F.embedding, local_ids, weight.local, local_padding)
    return sum_partials(rows.masked_fill(is_remote.unsqueeze(-1), 0.0), weight.group)


def _index_in_range(index: int, sharding: DimSharding, rank: int) -> int | None:
    """Return the local index of a row, or None if this rank does not hold it."""
    start, stop = sharding.ranges(rank)[0]
    return index - start if start <= index < stop else None


def _check_ids(ids: Tensor, size: int) -> None:
    """Raise `IndexError` for an index out of range on CPU, as torch does; a sharded lookup would return zeros."""
    if ids.device.type == "cpu" and ids.numel() and not bool(((ids >= 0) & (ids < size)).all()):
        raise IndexError("index out of range in self")


@register_rule("scaled_dot_product_attention")
def _attention(call: FunctionCall) -> Any:
    return _attend_local_heads(_torch_attention, call.arguments)


def compute_sharded_attention(attention_function: AttentionFunction, args: Any, kwargs: Any) -> Any:
    """Call `attention_function` instead of `F.scaled_dot_product_attention`, on this rank's heads only.

    If the tensors are not sharded, or no sharding rule applies, `attention_function` gets the full tensors.
    """

    name = F.scaled_dot_product_attention.__name__
    arguments = bind_arguments(name, args, kwargs)
    if arguments is None:
        return F.scaled_dot_product_attention(*args, **kwargs)  # torch raises the error for the wrong call

    def attend_all_heads(**arguments: Any) -> Tensor:
        return attention_function(
            arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), sharded_query=None, **arguments
        )

    if not find_sharded_tensors((), arguments):
        return attend_all_heads(**arguments)
    try:
        return _attend_local_heads(attention_function, arguments)
    except NoRule as no_rule:
        return apply_to_full_tensors(
            attend_all_heads, (), arguments, name=name, incompatible_reshape=no_rule.incompatible_reshape
        )


def _attend_local_heads(attention_function: AttentionFunction, arguments: dict[str, Any]) -> ShardPropagatingTensor:
    q, k, v, mask = arguments["query"], arguments["key"], arguments["value"], arguments["attn_mask"]
    if not isinstance(q, ShardPropagatingTensor) or len(q.full_shape) - q.sharding.dim < 3:
        raise NoRule
    if min(q.sharding.local_size(rank) for rank in range(q.sharding.ranks)) == 0:
        raise NoRule  # a rank without heads would not take part in the collectives of backward
    is_grouped = arguments["enable_gqa"] and q.full_shape[-3] != k.shape[-3]
    dim = q.sharding.dim - len(q.full_shape)
    group, origins = common_group_and_origins(t for t in (q, k, v) if isinstance(t, ShardPropagatingTensor))
    local_keys, local_values = (_local_keys(x, q, dim, grouped=is_grouped) for x in (k, v))
    output = attention_function(
        q.local,
        local_keys,
        local_values,
        sharded_query=q,
        attn_mask=local_operand(mask, like=q, dim=dim),
        dropout_p=arguments["dropout_p"],
        is_causal=arguments["is_causal"],
        scale=arguments["scale"],
        enable_gqa=q.local.shape[-3] != local_keys.shape[-3],
    )
    return ShardPropagatingTensor.from_local(output, q.sharding, group, origins=origins)


def _torch_attention(
    query: Tensor, key: Tensor, value: Tensor, *, sharded_query: ShardPropagatingTensor | None, **arguments: Any
) -> Tensor:
    """Compute attention on this rank's heads with torch."""
    if arguments["dropout_p"] > 0.0:
        assert sharded_query is not None
        return _attention_with_dropout(sharded_query, key, value, arguments["dropout_p"], arguments)
    return F.scaled_dot_product_attention(query, key, value, **arguments)


def _local_keys(x: Any, q: ShardPropagatingTensor, dim: int, *, grouped: bool) -> Tensor:
    """Return the keys or values for this rank's query heads.

    In grouped-query attention, sharded key heads must match the query heads of the rank. Unsharded key heads are
    repeated to the number of query heads, and then sharded like them.
    """
    if not grouped or dim != -3:
        local: Tensor = local_operand(x, like=q, dim=dim)
        return local
    group_size = q.full_shape[-3] // x.shape[-3]
    if isinstance(x, ShardPropagatingTensor):
        if (
            x.sharding.dim - len(x.full_shape) != dim
            or x.sharding.repeat_interleave(group_size).sections != q.sharding.sections
        ):
            raise NoRule
        return x.local
    return take_local_shard(x.repeat_interleave(group_size, dim=-3), q.sharding, q.group)


def _attention_with_dropout(
    q: ShardPropagatingTensor, k: Tensor, v: Tensor, p: float, arguments: dict[str, Any]
) -> Tensor:
    """Compute attention with dropout in separate steps, as torch does on the CPU."""
    if q.local.device.type != "cpu":
        raise NoRule  # fused kernels draw in their own order: every rank computes all heads
    if q.local.shape[-3] != k.shape[-3]:
        group_size = q.local.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group_size, -3), v.repeat_interleave(group_size, -3)
    scale = q.full_shape[-1] ** -0.5 if arguments["scale"] is None else arguments["scale"]
    scores = (q.local * scale**0.5) @ (k.transpose(-2, -1) * scale**0.5)
    mask = arguments["attn_mask"]
    if arguments["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1).contiguous()
    return weights * local_dropout_mask(weights, p, q.sharding, q.group) @ v


@register_rule("baddbmm")
def _baddbmm(call: FunctionCall) -> Any:
    """Apply `baddbmm` to operands that are sharded along the batch dimension."""
    operands = [call[name] for name in ("input", "batch1", "batch2")]
    first_sharded = next((t for t in operands[1:] if isinstance(t, ShardPropagatingTensor)), None)
    if first_sharded is None or _negative_sharded_dim(first_sharded) != -3:
        raise NoRule
    group, origins = common_group_and_origins(t for t in operands if isinstance(t, ShardPropagatingTensor))
    local_operands = [local_operand(t, like=first_sharded, dim=-3) for t in operands]
    return ShardPropagatingTensor.from_local(
        torch.baddbmm(*local_operands, beta=call["beta"], alpha=call["alpha"]),
        first_sharded.sharding,
        group,
        origins=origins,
    )
