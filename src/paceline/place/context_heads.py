"""`nn.MultiheadAttention` on a part of a sequence: its projections as they are, its attention handed to the ring."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import LayoutError

Attention = Callable[..., Tensor]


def heads_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    attention: Attention,
) -> tuple[Tensor, None]:
    """What `F.multi_head_attention_forward` gives for (length, batch, width), without the weights of the attention.

    Raises:
        LayoutError: it adds keys of its own, which have no place in a ring.
    """
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise LayoutError(
            "an nn.MultiheadAttention adds keys of its own (add_bias_kv, add_zero_attn or static keys).",
            cause="they belong to no position of the sequence, so to no rank",
            hint="nn.MultiheadAttention(..., add_bias_kv=False, add_zero_attn=False), or leave cp out",
        )
    batched = query.dim() == 3
    if not batched:
        query, key, value = (t[:, None] for t in (query, key, value))
    weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases: Any = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        _split(F.linear(t, w, b), num_heads)
        for t, w, b in zip((query, key, value), weights, biases, strict=True)  # type: ignore[arg-type]
    )
    mask = _mask(attn_mask, key_padding_mask, batch=q.shape[0], heads=num_heads)
    seen = attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p if training else 0.0,
        is_causal=is_causal and attn_mask is None,
    )
    found = F.linear(seen.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    return (found if batched else found[:, 0]), None


def _split(projected: Tensor, num_heads: int) -> Tensor:
    """(length, batch, width) to (batch, heads, length, width of a head)."""
    length, batch, width = projected.shape
    return projected.view(length, batch, num_heads, width // num_heads).permute(1, 2, 0, 3)


def _mask(mask: Tensor | None, padding: Tensor | None, *, batch: int, heads: int) -> Tensor | None:
    """One additive mask (batch or 1, heads or 1, queries, keys); here True means hidden."""
    found: Tensor | None = None
    if mask is not None:
        found = _additive(mask)
        found = found[None, None] if found.dim() == 2 else found.view(batch, heads, *found.shape[-2:])
    if padding is not None:
        hidden = _additive(padding if padding.dim() == 2 else padding[None])[:, None, None, :]
        found = hidden if found is None else found + hidden
    return found


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
