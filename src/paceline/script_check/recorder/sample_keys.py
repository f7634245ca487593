"""Keys of samples: a 64-bit number for each sample of a batch, equal for equal inputs on any rank and in any order."""

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.script_check.recorder.tensor_print import bits_of, mix_bits
from paceline.torch_internals.pytree import tensor_leaves

OutputKey = tuple[StorageWeakRef, int]
_MASK = "attention_mask"
_IGNORED_LABEL = -100  # of the cross entropy of torch
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # of splitmix64, as a signed number


def sample_keys(args: Any, kwargs: Any, *, own_outputs: Set[OutputKey]) -> list[int] | None:
    """Return a key for each entry of dimension 0 of the inputs; None if the inputs are no batch of data.

    Padding is left out where there is an `attention_mask`. Tensors that need a gradient, and those whose key is in
    `own_outputs`, come from the models, and are no data.
    """
    batch = [each for each in tensor_leaves((args, kwargs)) if each.dim() and is_data(each, own_outputs=own_outputs)]
    if not batch or not batch[0].size(0) or hasattr(batch[0], "placements") or batch[0].is_meta:
        return None
    mask = _find_mask(kwargs)
    keys = torch.zeros(batch[0].size(0), dtype=torch.int64, device=batch[0].device)
    for tensor in batch:
        if tensor.size(0) == len(keys) and not tensor.is_meta:
            sums = _nested_sums(tensor) if tensor.is_nested else _row_sums(tensor, mask)
            keys = mix_bits(keys * 31 + sums.to(keys.device))
    return [int(key) for key in keys.tolist()]


def row_shape(args: Any, kwargs: Any, *, own_outputs: Set[OutputKey]) -> tuple[int, ...]:
    """Return the shape of one sample in the first tensor of a batch; it is empty for samples of unequal shapes."""
    batch = [each for each in tensor_leaves((args, kwargs)) if each.dim() and is_data(each, own_outputs=own_outputs)]
    return tuple(batch[0].shape[1:]) if batch and not batch[0].is_nested else ()


def is_data(tensor: Tensor, *, own_outputs: Set[OutputKey]) -> bool:
    """Return whether a tensor comes from the data: it needs no gradient, and is not one of `own_outputs`."""
    return not tensor.requires_grad and output_key(tensor) not in own_outputs


def output_key(tensor: Tensor) -> OutputKey | None:
    """Return a key that a tensor has in common with what `detach` makes of it; None if it has no memory of its own.

    The key keeps the identity of the memory, and not the memory: a later tensor at the same address has another key.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # of sparse tensors
        return None


def count_targets(args: Any, kwargs: Any) -> int:
    """Return the number of labels, or else of tokens that are no padding; 0 if the inputs have neither."""
    labels, mask = _find_named(args, kwargs, "labels"), _find_named(args, kwargs, _MASK)
    if labels is not None and not labels.is_floating_point():
        return int((labels != _IGNORED_LABEL).sum())
    return int((mask != 0).sum()) if mask is not None and mask.dim() == 2 else 0


def has_loss_count(kwargs: Any) -> bool:
    """Return whether the script gives the model the count by which the loss is divided."""
    return isinstance(kwargs, Mapping) and kwargs.get("num_items_in_batch") is not None


def _find_named(args: Any, kwargs: Any, name: str) -> Tensor | None:
    """Return a tensor with a name among the arguments, or in a mapping that is one of them."""
    mappings = [value for value in (kwargs, *args) if isinstance(value, Mapping)]
    found = [each[name] for each in mappings if isinstance(each.get(name), Tensor)]
    return next((tensor for tensor in found if not hasattr(tensor, "placements")), None)


def _find_mask(kwargs: Any) -> Tensor | None:
    mask = kwargs.get(_MASK) if isinstance(kwargs, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _nested_sums(tensor: Tensor) -> Tensor:
    """Return the sum of the mixed bits and places for each tensor in a nested one."""
    return torch.cat([_row_sums(part.reshape(1, -1), None) for part in tensor.unbind()])


def _row_sums(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Return for each row the sum of the mixed bits and places of its elements."""
    rows = bits_of(tensor).view(len(tensor), -1)
    if mask is not None and mask.shape == tensor.shape:
        kept = mask.reshape(rows.shape).to(rows.device) != 0
        places = kept.long().cumsum(dim=1)
    else:
        kept = None
        places = torch.arange(1, rows.size(1) + 1, device=rows.device).expand_as(rows)
    mixed = mix_bits(rows * 3 + places * _GOLDEN)
    return (mixed if kept is None else mixed * kept).sum(dim=1)
