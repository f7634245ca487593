"""Ring attention over a sequence that is sharded over the ranks.

Each rank keeps its queries. In each round it attends to the keys and values of one rank, while it sends them to the
next rank. The result so far is an output and, for each query, the logarithm of the sum of exponentials of its scores
(LSE). With the LSE, two partial results are merged exactly. Backward sends keys, values and their gradients around the
ring until each gradient is back on the rank of its key (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers", 2023; merging: Milakov and Gimelshein, 2018). Forward and backward compute blocks of at most `BLOCK_SIZE`
x `BLOCK_SIZE` scores. In this file, `keys_values` is a list of keys, values and, if there is one, the key mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

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
        """Yield pairs of a block of this rank's queries and a block of the keys of rank `owner`.

        Pairs in which a causal mask masks all keys are left out.
        """
        for query_chunk in self.sharding.chunks(self.world.rank):
            for query_block in query_chunk.split(max_size=BLOCK_SIZE):
                for key_chunk in self.sharding.chunks(owner):
                    for key_block in key_chunk.split(max_size=BLOCK_SIZE):
                        if not self.is_causal or key_block.start < query_block.stop:
                            yield query_block, key_block

    def key_owner(self, round_index: int) -> int:
        """Return the rank whose keys this rank uses in a round."""
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

    `query` has the shape (batch, key heads, queries per key head, length, width); `key` and `value` have the shape
    (batch, key heads, length, width). `key_mask`, uint8 of shape (batch, length), is zero for masked keys of this rank.
    `dropout_mask`, of shape (batch, heads, length, full length), is True where dropout keeps a weight. The output of a
    query is 0 if all its keys are masked.
    """
    with recompute_together():
        output: Tensor = _RingAttention.apply(query, key, value, key_mask, dropout_mask, ring)  # type: ignore[no-untyped-call]
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        dropout_mask: Tensor | None,
        ring: Ring,
    ) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=dtype)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)
        keys_values = [key, value] if key_mask is None else [key, value, key_mask]
        num_rounds = ring.world.world_size
        for round_index in range(num_rounds):
            wait = _start_ring_shift(ring, keys_values, round_index) if round_index + 1 < num_rounds else None
            for query_block, key_block in ring.blocks(ring.key_owner(round_index)):
                _merge_block(out, lse, query, keys_values, dropout_mask, query_block, key_block, ring)
            keys_values = wait() if wait is not None else keys_values
        ctx.ring, ctx.has_dropout = ring, dropout_mask is not None
        ctx.save_for_backward(*(t for t in (query, key, value, out, lse, dropout_mask, key_mask) if t is not None))
        return out.to(query.dtype)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        query, key, value, out, lse, *masks = ctx.saved_tensors
        dropout_mask = masks.pop(0) if ctx.has_dropout else None
        ring: Ring = ctx.ring
        grad = grad.to(out.dtype)
        delta = (grad * out).sum(-1)  # as in FlashAttention: the sum of weights times their gradients, for each query
        d_query = torch.zeros_like(query, dtype=out.dtype)
        keys_values = [key, value, *masks]
        d_keys_values = [torch.zeros_like(key, dtype=out.dtype), torch.zeros_like(value, dtype=out.dtype)]
        num_rounds = ring.world.world_size
        for round_index in range(num_rounds):
            wait = _start_ring_shift(ring, keys_values, round_index) if round_index + 1 < num_rounds else None
            for query_block, key_block in ring.blocks(ring.key_owner(round_index)):
                saved = query, grad, delta, lse, dropout_mask
                _backward_block(d_query, d_keys_values, saved, keys_values, query_block, key_block, ring)
            d_keys_values = _start_ring_shift(ring, d_keys_values, round_index)()
            keys_values = wait() if wait is not None else keys_values
        d_key, d_value = d_keys_values
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


def _start_ring_shift(ring: Ring, tensors: list[Tensor], round_index: int) -> Any:
    """Start to send tensors to the next rank; return a function that waits for those of the previous rank."""
    length = ring.sharding.local_length(ring.key_owner(round_index + 1))
    shapes = [(*t.shape[:-2], length, t.shape[-1]) if t.dim() == 4 else (t.shape[0], length) for t in tensors]
    return ring.world.start_ring_shift(tensors, shapes=shapes)


def _scores(
    query: Tensor,
    keys_values: list[Tensor],
    query_block: SequenceChunk,
    key_block: SequenceChunk,
    ring: Ring,
    dtype: torch.dtype,
) -> Tensor:
    """Return the scores (batch, key heads, queries per key head x rows, columns), minus infinity where masked."""
    queries = query[..., query_block.local_slice, :].flatten(2, 3)
    keys = keys_values[0][..., key_block.local_slice, :]
    scores = (queries @ keys.transpose(-1, -2)).to(dtype) * ring.scale
    if ring.is_causal and key_block.stop - 1 > query_block.start:
        query_positions = torch.arange(query_block.start, query_block.stop, device=query.device).repeat(query.shape[2])
        key_positions = torch.arange(key_block.start, key_block.stop, device=query.device)
        scores = scores.masked_fill(key_positions[None, :] > query_positions[:, None], -torch.inf)
    if len(keys_values) > 2:
        is_masked = keys_values[2][:, key_block.local_slice] == 0
        scores = scores.masked_fill(is_masked[:, None, None, :], -torch.inf)
    return scores


def _exp_difference(exponent: Tensor, base: Tensor) -> Tensor:
    """Return exp(exponent - base), and 0 where the base is minus infinity because all keys are masked."""
    return torch.exp(exponent - base.masked_fill(base == -torch.inf, 0.0))


def _apply_dropout(
    weights: Tensor, dropout_mask: Tensor | None, query_block: SequenceChunk, key_block: SequenceChunk, ring: Ring
) -> Tensor:
    """Apply dropout with its scaling to the weights, or to their gradients."""
    if dropout_mask is None:
        return weights
    block_mask = dropout_mask[:, :, query_block.local_slice, key_block.full_slice]
    return weights * block_mask.reshape(weights.shape) * (1.0 / (1.0 - ring.dropout))


def _merge_block(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    keys_values: list[Tensor],
    dropout_mask: Tensor | None,
    query_block: SequenceChunk,
    key_block: SequenceChunk,
    ring: Ring,
) -> None:
    """Merge the attention over a block of keys into the running output and LSE of the queries."""
    scores = _scores(query, keys_values, query_block, key_block, ring, out.dtype)
    query_slice = query_block.local_slice
    values = keys_values[1][..., key_block.local_slice, :]
    block_lse = torch.logsumexp(scores, -1)
    weights = _apply_dropout(_exp_difference(scores, block_lse[..., None]), dropout_mask, query_block, key_block, ring)
    block_out = (weights.to(values.dtype) @ values).to(out.dtype)
    shape = out[..., query_slice, :].shape
    block_lse, block_out = block_lse.view(shape[:-1]), block_out.view(shape)
    merged_lse = torch.logaddexp(lse[..., query_slice], block_lse)
    old_weight = _exp_difference(lse[..., query_slice], merged_lse)[..., None]
    block_weight = _exp_difference(block_lse, merged_lse)[..., None]
    out[..., query_slice, :] = out[..., query_slice, :] * old_weight + block_out * block_weight
    lse[..., query_slice] = merged_lse


def _backward_block(
    d_query: Tensor,
    d_keys_values: list[Tensor],
    saved: Any,
    keys_values: list[Tensor],
    query_block: SequenceChunk,
    key_block: SequenceChunk,
    ring: Ring,
) -> None:
    """Add the gradients of one block to `d_query` and `d_keys_values`.

    `saved` contains the queries, the gradient and the delta (see `backward`) of the output, the LSE and the dropout
    mask.
    """
    query, grad, delta, lse, dropout_mask = saved
    query_slice, key_slice = query_block.local_slice, key_block.local_slice
    scores = _scores(query, keys_values, query_block, key_block, ring, d_query.dtype)
    weights = _exp_difference(scores, lse[..., query_slice].flatten(2, 3)[..., None])
    d_out = grad[..., query_slice, :].flatten(2, 3)
    dropped_weights = _apply_dropout(weights, dropout_mask, query_block, key_block, ring)
    d_keys_values[1][..., key_slice, :] += dropped_weights.transpose(-1, -2) @ d_out
    d_weights = d_out @ keys_values[1][..., key_slice, :].to(d_out.dtype).transpose(-1, -2)
    d_weights = _apply_dropout(d_weights, dropout_mask, query_block, key_block, ring)
    d_scores = weights * (d_weights - delta[..., query_slice].flatten(2, 3)[..., None]) * ring.scale
    keys, queries = keys_values[0][..., key_slice, :], query[..., query_slice, :].flatten(2, 3)
    d_query[..., query_slice, :] += (d_scores @ keys.to(d_out.dtype)).view(d_query[..., query_slice, :].shape)
    d_keys_values[0][..., key_slice, :] += d_scores.transpose(-1, -2) @ queries.to(d_out.dtype)
