"""Sharding rules of matmuls, embedding and attention.

A sharded contracted dimension gives partial sums, which are added once; any other sharding stays. `linear` with the
rows of its weight sharded is Megatron's column split, with its columns sharded the row split (the bias is added once,
after the sum).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import TensorParallelGroup, copy_in, reduce_out, scatter, take_own
from paceline.parallel.tensor_parallel.rules.elementwise import own_draws
from paceline.parallel.tensor_parallel.rules.views import piece_like, positive_dim
from paceline.parallel.tensor_parallel.sharded_tensor import (
    FunctionCall,
    NoRule,
    ShardPropagatingTensor,
    on_whole,
    operand,
    record_all_gather,
    rule,
    split_in,
    wire_and_origins,
)
from paceline.parallel.tensor_parallel.sharding import DimSharding, even_cut
from paceline.torch_internals.function_signatures import read_call

Attend = Callable[..., Tensor]
"""Attention on this rank's heads: `heads` is the sharded queries, or None if this rank has all heads."""


def sum_partials(partial: Tensor, wire: TensorParallelGroup) -> Any:
    """Add the partial sums of all ranks; with sequence sharding each rank keeps its piece of the sequence."""
    if wire.sequence and partial.dim() == 3 and partial.shape[1] >= wire.size:
        cut = even_cut(partial.shape[1], ranks=wire.size, dim=1)
        return ShardPropagatingTensor.of(scatter(partial, cut, wire), cut, wire)
    return reduce_out(partial, wire)


def read_whole(x: Any, wire: TensorParallelGroup) -> Tensor:
    """Return the whole of an operand that sharded work reads; backward sums its gradient."""
    if not isinstance(x, ShardPropagatingTensor):
        return copy_in(x, wire)
    if x.cut.dim != len(x.whole) - 2 or not wire.sequence:
        record_all_gather(x, "a matmul that reads it whole")
    return x.gathered(partial=True)


def own_piece(x: Any, cut: DimSharding, dim: int, wire: TensorParallelGroup) -> Tensor:
    """Return this rank's piece of an operand along `dim` (negative), to match a sharding."""
    if isinstance(x, ShardPropagatingTensor):
        if x.cut.sections == cut.sections and x.cut.dim - len(x.whole) == dim:
            return x.local
        record_all_gather(x, "a matmul that reads it split differently")
        x = x.gathered()
    return take_own(x, cut.at(x.dim() + dim), wire)


@rule("linear")
def _linear(call: FunctionCall) -> Any:
    x, weight, bias = call["input"], call["weight"], call["bias"]
    wire, _ = wire_and_origins(t for t in (x, weight, bias) if isinstance(t, ShardPropagatingTensor))
    if isinstance(weight, ShardPropagatingTensor) and weight.cut.dim == 0:
        own = None if bias is None else own_piece(bias, weight.cut, -1, wire)
        made = F.linear(read_whole(x, wire), weight.local, own)
        return ShardPropagatingTensor.of(made, weight.cut.at(made.dim() - 1), wire, origins=weight.origins)
    if isinstance(weight, ShardPropagatingTensor):
        if isinstance(bias, ShardPropagatingTensor):
            raise NoRule
        partial = F.linear(own_piece(x, weight.cut, -1, wire), weight.local)
        total = sum_partials(partial, wire)
        return (
            total if bias is None else total + bias.to(total.dtype)
        )  # under autocast a product has its own dtype, not the weights'
    if (
        not isinstance(x, ShardPropagatingTensor)
        or isinstance(bias, ShardPropagatingTensor)
        or x.cut.dim == len(x.whole) - 1
    ):
        raise NoRule
    own = None if bias is None else copy_in(bias, wire)
    return piece_like(x, F.linear(x.local, copy_in(weight, wire), own), x.cut)


@rule("matmul", "__matmul__", "__rmatmul__", "mm", "bmm")
def _matmul(call: FunctionCall) -> Any:
    a, b = call["input"], call["mat2" if call.name in ("mm", "bmm") else "other"]
    if (
        a.dim() < 2
        or b.dim() < 2
        or (call.name in ("mm", "bmm") and (a.dim(), b.dim()) != (2 + (call.name == "bmm"),) * 2)
    ):
        raise NoRule
    wire, origins = wire_and_origins(t for t in (a, b) if isinstance(t, ShardPropagatingTensor))
    if _at(a) == -1 or _at(b) == -2:
        cut = a.cut if _at(a) == -1 else b.cut
        return reduce_out(own_piece(a, cut, -1, wire) @ own_piece(b, cut, -2, wire), wire)
    if _at(b) == -1:
        made = read_whole(a, wire) @ b.local
        return ShardPropagatingTensor.of(made, b.cut.at(made.dim() - 1), wire, origins=origins)
    if _at(a) == -2:
        made = a.local @ read_whole(b, wire)
        return ShardPropagatingTensor.of(made, a.cut.at(made.dim() - 2), wire, origins=origins)
    first = a if isinstance(a, ShardPropagatingTensor) else b
    dim = first.cut.dim - len(first.whole)
    made = operand(a, of=first, dim=dim) @ operand(b, of=first, dim=dim)
    return ShardPropagatingTensor.of(made, first.cut.at(made.dim() + dim), wire, origins=origins)


def _at(x: Any) -> int:
    return x.cut.dim - len(x.whole) if isinstance(x, ShardPropagatingTensor) else 0


@rule("addmm")
def _addmm(call: FunctionCall) -> Any:
    bias, a, b = call["input"], call["mat1"], call["mat2"]
    if call["beta"] != 1 or call["alpha"] != 1:
        raise NoRule
    if not (isinstance(b, ShardPropagatingTensor) and _at(b) == -1):
        product = torch.matmul(a, b)
        return product + bias.to(product.dtype)
    own = own_piece(bias, b.cut, -1, b.wire)
    return ShardPropagatingTensor.of(torch.addmm(own, read_whole(a, b.wire), b.local), b.cut, b.wire, origins=b.origins)


@rule("einsum")
def _einsum(call: FunctionCall) -> Any:
    equation, operands = call["equation"], call["operands"]
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise NoRule
    ins, out = equation.replace(" ", "").split("->")
    words = ins.split(",")
    if len(words) != len(operands):
        raise NoRule
    at, first = next((n, t) for n, t in enumerate(operands) if isinstance(t, ShardPropagatingTensor))
    letter = words[at][first.cut.dim]
    if any(w.count(letter) > 1 or (letter in w and t.shape[w.index(letter)] != first.cut.size)
           for w, t in zip(words, operands, strict=True)):  # fmt: skip
        raise NoRule  # a diagonal, or a size of 1 that broadcasts
    own = []
    for word, value in zip(words, operands, strict=True):
        if letter in word:
            own.append(own_piece(value, first.cut, word.index(letter) - len(word), first.wire))
        else:
            own.append(read_whole(value, first.wire))
    made = torch.einsum(equation, *own)
    wire, origins = wire_and_origins(t for t in operands if isinstance(t, ShardPropagatingTensor))
    if letter not in out:
        return reduce_out(made, wire)
    return ShardPropagatingTensor.of(made, first.cut.at(out.index(letter)), wire, origins=origins)


@rule("embedding")
def _embedding(call: FunctionCall) -> Any:
    """Look up the rows that this rank holds; the sum over ranks is exact, since all other ranks add zero."""
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
    if weight.cut.dim == 1:
        made = F.embedding(ids, weight.local, padding)
        return ShardPropagatingTensor.of(made, weight.cut.at(made.dim() - 1), weight.wire, origins=weight.origins)
    if len(weight.cut.sections) > 1:
        raise NoRule
    start, stop = weight.cut.ranges(weight.wire.rank)[0]
    if padding is not None:
        padding = positive_dim(padding, weight.cut.size)
    elsewhere = (ids < start) | (ids >= stop)
    _check_ids(ids, weight.cut.size)
    own = torch.where(elsewhere, 0, ids - start)
    inside = padding is not None and start <= padding < stop
    found = F.embedding(own, weight.local, padding - start if inside and padding is not None else None)
    return sum_partials(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), weight.wire)


def _check_ids(ids: Tensor, size: int) -> None:
    """Raise `IndexError` for an index out of range on CPU, as one process does; a sharded lookup would return zeros."""
    if ids.device.type == "cpu" and ids.numel() and not bool(((ids >= 0) & (ids < size)).all()):
        raise IndexError("index out of range in self")


@rule("scaled_dot_product_attention")
def _attention(call: FunctionCall) -> Any:
    return _own_heads(_attend, call.given)


def attention_by(attend: Attend, args: Any, kwargs: Any) -> Any:
    """Compute `F.scaled_dot_product_attention` on sharded heads, with `attend` on this rank's own heads.

    If no rule keeps the sharding, `attend` is given whole tensors.
    """

    name = F.scaled_dot_product_attention.__name__
    given = read_call(name, args, kwargs)
    if given is None:
        return F.scaled_dot_product_attention(*args, **kwargs)  # torch raises the error for the wrong call

    def on_all(**given: Any) -> Tensor:
        return attend(given.pop("query"), given.pop("key"), given.pop("value"), heads=None, **given)

    if not split_in((), given):
        return on_all(**given)
    try:
        return _own_heads(attend, given)
    except NoRule as unknown:
        return on_whole(on_all, (), given, name=name, misfit=unknown.misfit)


def _own_heads(attend: Attend, given: dict[str, Any]) -> ShardPropagatingTensor:
    q, k, v, mask = given["query"], given["key"], given["value"], given["attn_mask"]
    if not isinstance(q, ShardPropagatingTensor) or len(q.whole) - q.cut.dim < 3:
        raise NoRule
    if min(q.cut.held(rank) for rank in range(q.cut.ranks)) == 0:
        raise NoRule  # on a rank without heads, backward would skip the collectives of the others
    groups = given["enable_gqa"] and q.whole[-3] != k.shape[-3]
    dim = q.cut.dim - len(q.whole)
    wire, origins = wire_and_origins(t for t in (q, k, v) if isinstance(t, ShardPropagatingTensor))
    own_k, own_v = (_keys(x, q, dim, grouped=groups) for x in (k, v))
    made = attend(
        q.local,
        own_k,
        own_v,
        heads=q,
        attn_mask=operand(mask, of=q, dim=dim),
        dropout_p=given["dropout_p"],
        is_causal=given["is_causal"],
        scale=given["scale"],
        enable_gqa=q.local.shape[-3] != own_k.shape[-3],
    )
    return ShardPropagatingTensor.of(made, q.cut, wire, origins=origins)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, heads: ShardPropagatingTensor | None, **given: Any) -> Tensor:
    """Compute attention on this rank's heads with torch."""
    if given["dropout_p"] > 0.0:
        assert heads is not None
        return _dropped(heads, key, value, given["dropout_p"], given)
    return F.scaled_dot_product_attention(query, key, value, **given)


def _keys(x: Any, q: ShardPropagatingTensor, dim: int, *, grouped: bool) -> Tensor:
    """Return the keys or values for this rank's query heads.

    Grouped-query heads are sharded like the query groups, or whole: then they are repeated, and this rank takes its
    own.
    """
    if not grouped or dim != -3:
        found: Tensor = operand(x, of=q, dim=dim)
        return found
    times = q.whole[-3] // x.shape[-3]
    if isinstance(x, ShardPropagatingTensor):
        if x.cut.dim - len(x.whole) != dim or x.cut.repeated(times).sections != q.cut.sections:
            raise NoRule
        return x.local
    return take_own(x.repeat_interleave(times, dim=-3), q.cut, q.wire)


def _dropped(q: ShardPropagatingTensor, k: Tensor, v: Tensor, p: float, given: dict[str, Any]) -> Tensor:
    """Compute attention with dropout in separate steps, as torch does on the CPU."""
    if q.local.device.type != "cpu":
        raise NoRule  # fused kernels draw in their own order: every rank computes the whole
    if q.local.shape[-3] != k.shape[-3]:
        times = q.local.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    scale = q.whole[-1] ** -0.5 if given["scale"] is None else given["scale"]
    scores = (q.local * scale**0.5) @ (k.transpose(-2, -1) * scale**0.5)
    mask = given["attn_mask"]
    if given["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    shares = torch.softmax(scores, -1).contiguous()
    return shares * own_draws(shares, p, q.cut, q.wire) @ v


@rule("baddbmm")
def _baddbmm(call: FunctionCall) -> Any:
    """Apply `baddbmm` to operands whose batch dimension is sharded alike."""
    operands = [call[name] for name in ("input", "batch1", "batch2")]
    first = next((t for t in operands[1:] if isinstance(t, ShardPropagatingTensor)), None)
    if first is None or _at(first) != -3:
        raise NoRule
    wire, origins = wire_and_origins(t for t in operands if isinstance(t, ShardPropagatingTensor))
    own = [operand(t, of=first, dim=-3) for t in operands]
    return ShardPropagatingTensor.of(
        torch.baddbmm(*own, beta=call["beta"], alpha=call["alpha"]), first.cut, wire, origins=origins
    )
