"""Interpretation of an attention mask that a model built from its shard of the sequence.

Two kinds of masks of a shard determine the mask of the full sequence: padding masks (keys that no query attends to) and
causal masks (no query attends to a later key). Other masks (windows, biases, packed documents) do not determine it and
raise an error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class InterpretedMask:
    """The meaning of a mask: whether it is causal, and which of this rank's keys are not padding.

    `keep` has the shape (batch, length); None means that no key is padding.
    """

    is_causal: bool
    key_mask: Tensor | None


def interpret_mask(mask: Tensor | None, *, is_causal: bool, batch: int, length: int) -> InterpretedMask:
    """Interpret a mask for `length` queries and keys.

    Raises:
        LayoutError: the mask is not causal, padding, or both.
    """
    if mask is None:
        return InterpretedMask(is_causal=is_causal, key_mask=None)
    seen = _attended_pairs(mask)
    if seen is None or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise _unsupported_mask(mask)
    seen = seen.expand(*seen.shape[:-2], length, length) if seen.shape[-2] == 1 else seen
    while seen.dim() > 4 or (seen.dim() > 3 and bool((seen[:, :1] == seen).all())):
        seen = seen[:, 0]  # equal for all heads
    last = seen[..., -1:, :]
    lower = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    causal = bool(torch.equal(seen, last & lower))
    if seen.dim() > 3 or not (causal or torch.equal(seen, last.expand_as(seen))):
        raise _unsupported_mask(mask)
    keep = last.reshape(-1, length).expand(batch, length)
    return InterpretedMask(is_causal=causal or is_causal, key_mask=None if bool(keep.all()) else keep.to(torch.uint8))


def _attended_pairs(mask: Tensor) -> Tensor | None:
    """Return a mask that is True where a query attends to a key; None for a mask that also adds a bias."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool(((mask == 0) | hidden).all()) else None


def _unsupported_mask(mask: Tensor) -> LayoutError:
    return LayoutError(
        f"an attention mask of shape {tuple(mask.shape)} is neither causal, nor padding, nor both.",
        cause="a sliding window, a position bias (ALiBi, T5), packed documents or a cross-attention: "
        "built from one rank's part of the sequence, it does not cover the other parts",
        hint="train this model with tp, pp or fsdp, or with full causal attention "
        "(for a window: model.config.sliding_window = None)",
    )
