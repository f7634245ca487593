"""Ring attention over a sequence that is sharded over the ranks.

Each rank keeps its queries. In each round it attends to the keys and values of one rank and passes them on to the next
rank. The running result is an output and, for each query, the logarithm of the sum of exponentials (LSE), with which
two partial results are merged exactly. Backward passes keys, values and their gradients around the ring until each
gradient is back on its own rank (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", 2023; the merging:
Milakov and Gimelshein, 2018). Forward and backward compute blocks of at most `BLOCK` x `BLOCK` scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.activation_checkpointing.saved_ops import recompute_together
from paceline.parallel.context_parallel.sequence_sharding import SequenceChunk, SequenceSharding

BLOCK_SIZE = 1024


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The parameters of ring attention: its ranks, the sharding of the sequence, mask, scale and dropout rate."""

    world: World
    sharding: SequenceSharding
    is_causal: bool
    scale: float
    dropout: float = 0.0

    def blocks(self, owner: int) -> Iterator[tuple[SequenceChunk, SequenceChunk]]:
        """Yield blocks of this rank's queries and `owner`'s keys, except those that a causal mask excludes."""
        for mine in self.sharding.chunks(self.world.rank):
            for query in mine.split(max_size=BLOCK_SIZE):
                for theirs in self.sharding.chunks(owner):
                    for key in theirs.split(max_size=BLOCK_SIZE):
                        if not self.is_causal or key.start < query.stop:
                            yield query, key

    def key_owner(self, round_index: int) -> int:
        """Return the rank whose keys this rank has in a round."""
        return (self.world.rank - round_index) % self.world.world_size


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None,
    ring: Ring,
    dropout_mask: Tensor | None = None,
) -> Tensor:
    """Return attention of this rank's queries over the keys of all ranks.

    `query` (batch, key heads, queries per key head, length, width), `key` and `value` (batch, key heads, length,
    width); `keep` (batch, length), uint8, is zero for masked keys of this rank; `drop` (batch, heads,
    length, full length) is True where dropout keeps a weight. The output of a query without keys is 0.
    """
    with recompute_together():
        found: Tensor = _RingAttention.apply(query, key, value, key_mask, dropout_mask, ring)  # type: ignore[no-untyped-call]
    return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, drop: Tensor | None, ring: Ring
    ) -> Tensor:
        high = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=high)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=high)
        held = [key, value] if keep is None else [key, value, keep]
        for turn in range(ring.world.world_size):
            wait = _start_ring_shift(ring, held, turn) if turn + 1 < ring.world.world_size else None
            for rows, columns in ring.blocks(ring.key_owner(turn)):
                _merge_block(out, lse, query, held, drop, rows, columns, ring)
            held = wait() if wait is not None else held
        ctx.ring, ctx.has_drop = ring, drop is not None
        ctx.save_for_backward(*(t for t in (query, key, value, out, lse, drop, keep) if t is not None))
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        query, key, value, out, lse, *masks = ctx.saved_tensors
        drop = masks.pop(0) if ctx.has_drop else None
        ring: Ring = ctx.ring
        grad = grad.to(out.dtype)
        inner = (grad * out).sum(-1)
        d_query = torch.zeros_like(query, dtype=out.dtype)
        held = [key, value, *masks]
        sums = [torch.zeros_like(key, dtype=out.dtype), torch.zeros_like(value, dtype=out.dtype)]
        for turn in range(ring.world.world_size):
            wait = _start_ring_shift(ring, held, turn) if turn + 1 < ring.world.world_size else None
            for rows, columns in ring.blocks(ring.key_owner(turn)):
                _backward_block(d_query, sums, (query, grad, inner, lse, drop), held, rows, columns, ring)
            sums = _start_ring_shift(ring, sums, turn)()
            held = wait() if wait is not None else held
        d_key, d_value = sums
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


def _start_ring_shift(ring: Ring, held: list[Tensor], turn: int) -> Any:
    """Start to send tensors to the next rank and to receive those of the next round from the previous rank."""
    length = ring.sharding.local_length(ring.key_owner(turn + 1))
    shapes = [(*t.shape[:-2], length, t.shape[-1]) if t.dim() == 4 else (t.shape[0], length) for t in held]
    return ring.world.start_ring_shift(held, shapes=shapes)


def _scores(
    query: Tensor, held: list[Tensor], rows: SequenceChunk, columns: SequenceChunk, ring: Ring, high: torch.dtype
) -> Tensor:
    """Return the scores (batch, key heads, queries per key head x rows, columns), minus infinity where masked."""
    part = query[..., rows.local_start : rows.local_start + rows.size, :].flatten(2, 3)
    keys = held[0][..., columns.local_start : columns.local_start + columns.size, :]
    scores = (part @ keys.transpose(-1, -2)).to(high) * ring.scale
    if ring.is_causal and columns.stop - 1 > rows.start:
        row = torch.arange(rows.start, rows.stop, device=query.device).repeat(query.shape[2])
        column = torch.arange(columns.start, columns.stop, device=query.device)
        scores = scores.masked_fill(column[None, :] > row[:, None], -torch.inf)
    if len(held) > 2:
        hidden = held[2][:, columns.local_start : columns.local_start + columns.size] == 0
        scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
    return scores


def _exp_difference(exponent: Tensor, base: Tensor) -> Tensor:
    """Return exp(exponent - base), and 0 where the base is minus infinity because all keys are masked."""
    return torch.exp(exponent - base.masked_fill(base == -torch.inf, 0.0))


def _apply_dropout(
    weights: Tensor, drop: Tensor | None, rows: SequenceChunk, columns: SequenceChunk, ring: Ring
) -> Tensor:
    """Apply dropout with its scaling to the weights, or to their gradients."""
    if drop is None:
        return weights
    drawn = drop[:, :, rows.local_start : rows.local_start + rows.size, columns.start : columns.stop]
    return weights * drawn.reshape(weights.shape) * (1.0 / (1.0 - ring.dropout))


def _merge_block(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    held: list[Tensor],
    drop: Tensor | None,
    rows: SequenceChunk,
    columns: SequenceChunk,
    ring: Ring,
) -> None:
    """Merge the attention over a block of keys into the running output and LSE of the queries."""
    scores = _scores(query, held, rows, columns, ring, out.dtype)
    there = slice(rows.local_start, rows.local_start + rows.size)
    values = held[1][..., columns.local_start : columns.local_start + columns.size, :]
    new = torch.logsumexp(scores, -1)
    weights = _apply_dropout(_exp_difference(scores, new[..., None]), drop, rows, columns, ring)
    seen = (weights.to(values.dtype) @ values).to(out.dtype)
    shape = out[..., there, :].shape
    new, seen = new.view(shape[:-1]), seen.view(shape)
    both = torch.logaddexp(lse[..., there], new)
    before, now = _exp_difference(lse[..., there], both)[..., None], _exp_difference(new, both)[..., None]
    out[..., there, :] = out[..., there, :] * before + seen * now
    lse[..., there] = both


def _backward_block(
    d_query: Tensor,
    sums: list[Tensor],
    saved: Any,
    held: list[Tensor],
    rows: SequenceChunk,
    columns: SequenceChunk,
    ring: Ring,
) -> None:
    """Add the gradients of a block to those of its queries, keys and values."""
    query, grad, inner, lse, drop = saved
    there = slice(rows.local_start, rows.local_start + rows.size)
    here = slice(columns.local_start, columns.local_start + columns.size)
    weights = _exp_difference(
        _scores(query, held, rows, columns, ring, d_query.dtype), lse[..., there].flatten(2, 3)[..., None]
    )
    of_out = grad[..., there, :].flatten(2, 3)
    sums[1][..., here, :] += _apply_dropout(weights, drop, rows, columns, ring).transpose(-1, -2) @ of_out
    of_weights = of_out @ held[1][..., here, :].to(of_out.dtype).transpose(-1, -2)
    of_weights = _apply_dropout(of_weights, drop, rows, columns, ring)
    of_scores = weights * (of_weights - inner[..., there].flatten(2, 3)[..., None]) * ring.scale
    d_query[..., there, :] += (of_scores @ held[0][..., here, :].to(of_out.dtype)).view(d_query[..., there, :].shape)
    sums[0][..., here, :] += of_scores.transpose(-1, -2) @ query[..., there, :].flatten(2, 3).to(of_out.dtype)
