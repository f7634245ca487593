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
    """Compute `F.multi_head_attention_forward` with `attention` in place of `F.scaled_dot_product_attention`.

    Inputs have the shape (length, batch, width) or (length, width). Return the output, and None for the attention
    weights.

    Raises:
        LayoutError: the module adds keys of its own, which have no position in the sequence.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    added_keys = ("bias_k", "bias_v", "static_k", "static_v")
    if arguments["add_zero_attn"] or any(arguments[name] is not None for name in added_keys):
        raise LayoutError(
            "an nn.MultiheadAttention adds keys of its own (add_bias_kv, add_zero_attn or static keys).",
            cause="they belong to no position of the sequence, and so to no rank",
            hint="nn.MultiheadAttention(..., add_bias_kv=False, add_zero_attn=False), or leave cp out",
        )
    inputs = [arguments["query"], arguments["key"], arguments["value"]]
    is_batched = inputs[0].dim() == 3
    q, k, v = _project(arguments, [t if is_batched else t[:, None] for t in inputs])
    batch, num_heads = q.shape[:2]
    attended = attention(
        q,
        k,
        v,
        attn_mask=_merge_masks(arguments["attn_mask"], arguments["key_padding_mask"], batch, num_heads),
        dropout_p=arguments["dropout_p"] if arguments["training"] else 0.0,
        is_causal=arguments["is_causal"] and arguments["attn_mask"] is None,
    )
    output = F.linear(attended.permute(2, 0, 1, 3).flatten(2), arguments["out_proj_weight"], arguments["out_proj_bias"])
    return (output if is_batched else output[:, 0]), None


def _project(arguments: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return queries, keys and values, each of shape (batch, heads, length, head width)."""
    if arguments["use_separate_proj_weight"]:
        weights = [arguments[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(arguments["in_proj_weight"].chunk(3))
    bias = arguments["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    projections = [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]
    return [_split_heads(projection, arguments["num_heads"]) for projection in projections]


def _split_heads(projection: Tensor, num_heads: int) -> Tensor:
    """Reshape (length, batch, width) to (batch, heads, length, head width)."""
    length, batch, width = projection.shape
    return projection.view(length, batch, num_heads, width // num_heads).permute(1, 2, 0, 3)


def _merge_masks(mask: Tensor | None, padding_mask: Tensor | None, batch: int, num_heads: int) -> Tensor | None:
    """Return one additive mask of shape (batch or 1, heads or 1, queries, keys), or None if neither mask is given.

    In the given masks, a boolean True masks a key.
    """
    merged: Tensor | None = None
    if mask is not None:
        merged = _to_additive_mask(mask)
        merged = merged[None, None] if merged.dim() == 2 else merged.view(batch, num_heads, *merged.shape[-2:])
    if padding_mask is not None:
        additive = _to_additive_mask(padding_mask if padding_mask.dim() == 2 else padding_mask[None])
        merged = additive[:, None, None, :] if merged is None else merged + additive[:, None, None, :]
    return merged


def _to_additive_mask(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
