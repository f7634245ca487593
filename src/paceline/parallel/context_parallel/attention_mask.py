"""Interpretation of an attention mask that a model built from its shard of the sequence.

From a shard's mask, ring attention derives the mask of the full sequence. This is possible for padding masks (keys that
no query attends to) and for causal masks (no query attends to a later key). Other masks, such as windows, biases and
packed documents, raise an error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class InterpretedMask:
    """The meaning of a mask: whether it is causal, and which of this rank's keys are not padding.

    `key_mask` has the shape (batch, length) and is zero for padding; None means that no key is padding.
    """

    is_causal: bool
    key_mask: Tensor | None


def interpret_mask(mask: Tensor | None, *, is_causal: bool, batch: int, length: int) -> InterpretedMask:
    """Return the meaning of the mask of an attention call with `batch` samples, and `length` queries and keys.

    `is_causal` is the argument of the call.

    Raises:
        LayoutError: the mask is not causal, padding, or both.
    """
    if mask is None:
        return InterpretedMask(is_causal=is_causal, key_mask=None)
    attended = _attended_pairs(mask)
    if attended is None or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise _unsupported_mask_error(mask)
    attended = attended.expand(*attended.shape[:-2], length, length) if attended.shape[-2] == 1 else attended
    # Drop the dimension of heads if the mask is equal for all heads. If a mask has more than 4 dimensions, dimension 1
    # is dropped without a comparison.
    while attended.dim() > 4 or (attended.dim() > 3 and bool((attended[:, :1] == attended).all())):
        attended = attended[:, 0]
    last_row = attended[..., -1:, :]
    lower_triangle = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    is_causal_mask = bool(torch.equal(attended, last_row & lower_triangle))
    if attended.dim() > 3 or not (is_causal_mask or torch.equal(attended, last_row.expand_as(attended))):
        raise _unsupported_mask_error(mask)
    key_mask = last_row.reshape(-1, length).expand(batch, length)
    has_padding = not bool(key_mask.all())
    return InterpretedMask(
        is_causal=is_causal_mask or is_causal, key_mask=key_mask.to(torch.uint8) if has_padding else None
    )


def _attended_pairs(mask: Tensor) -> Tensor | None:
    """Return a mask that is True where a query attends to a key; None if the given mask also adds a bias."""
    if mask.dtype == torch.bool:
        return mask
    is_masked = mask <= torch.finfo(mask.dtype).min
    return ~is_masked if bool(((mask == 0) | is_masked).all()) else None


def _unsupported_mask_error(mask: Tensor) -> LayoutError:
    return LayoutError(
        f"an attention mask of shape {tuple(mask.shape)} is neither causal, nor padding, nor both.",
        cause="a sliding window, a position bias (ALiBi, T5), packed documents or a cross-attention: "
        "built from one rank's part of the sequence, it does not cover the other parts",
        hint="train this model with tp, pp or fsdp, or with full causal attention "
        "(for a window: model.config.sliding_window = None)",
    )
