"""The forward of `nn.MultiheadAttention` on a shard of a sequence, with ring attention."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import LayoutError

Attention = Callable[..., Tensor]


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def multi_head_attention(*args: Any, attention: Attention, **kwargs: Any) -> tuple[Tensor, None]:
    """Return the output of `F.multi_head_attention_forward` for (length, batch, width), without attention weights.

    Raises:
        LayoutError: the module adds keys of its own, which have no position in the sequence.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["add_zero_attn"] or any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")):
        raise LayoutError(
            "an nn.MultiheadAttention adds keys of its own (add_bias_kv, add_zero_attn or static keys).",
            cause="they belong to no position of the sequence, and so to no rank",
            hint="nn.MultiheadAttention(..., add_bias_kv=False, add_zero_attn=False), or leave cp out",
        )
    inputs = [given["query"], given["key"], given["value"]]
    batched = inputs[0].dim() == 3
    q, k, v = _project(given, [t if batched else t[:, None] for t in inputs])
    mask = _merge_masks(given["attn_mask"], given["key_padding_mask"], batch_size=q.shape[0], num_heads=q.shape[1])
    seen = attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=given["dropout_p"] if given["training"] else 0.0,
        is_causal=given["is_causal"] and given["attn_mask"] is None,
    )
    found = F.linear(seen.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    return (found if batched else found[:, 0]), None


def _project(given: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return queries, keys and values, each of shape (batch, heads, length, head width)."""
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    return [
        _split_heads(F.linear(t, w, b), given["num_heads"]) for t, w, b in zip(inputs, weights, biases, strict=True)
    ]


def _split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """Reshape (length, batch, width) to (batch, heads, length, head width)."""
    length, batch, width = projected.shape
    return projected.view(length, batch, num_heads, width // num_heads).permute(1, 2, 0, 3)


def _merge_masks(mask: Tensor | None, padding_mask: Tensor | None, *, batch_size: int, num_heads: int) -> Tensor | None:
    """Return one additive mask (batch or 1, heads or 1, queries, keys). In boolean inputs, True masks a key."""
    found: Tensor | None = None
    if mask is not None:
        found = _to_additive_mask(mask)
        found = found[None, None] if found.dim() == 2 else found.view(batch_size, num_heads, *found.shape[-2:])
    if padding_mask is not None:
        hidden = _to_additive_mask(padding_mask if padding_mask.dim() == 2 else padding_mask[None])[:, None, None, :]
        found = hidden if found is None else found + hidden
    return found


def _to_additive_mask(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
