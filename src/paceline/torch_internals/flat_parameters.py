"""The flat parameters of FSDP1, and which part of each original parameter a rank has. Tested on torch 2.11 to 2.13."""

import sys
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

_MODULE = "torch.distributed.fsdp._flat_param"


@dataclass(frozen=True, kw_only=True)
class FlatPiece:
    """An original parameter in a flat parameter.

    `name` is that below the wrapped module. The parameter has `numel` elements, from `offset` on in the whole flat
    parameter. This rank has `length` of them in its shard: from `local_start` on there, and from `start` on in the
    original parameter. `original` is the parameter that the script sees, if it sees original ones.
    """

    name: str
    numel: int
    offset: int
    local_start: int
    start: int
    length: int
    original: Tensor | None


@dataclass(frozen=True, kw_only=True)
class FlatParameterParts:
    """A flat parameter and its pieces. `is_sharded`: each rank has another part of it."""

    parameter: Tensor
    is_sharded: bool
    pieces: tuple[FlatPiece, ...]


def find_flat_parameters(module: nn.Module) -> list[FlatParameterParts]:
    """Return the flat parameters of a module; none if FSDP1 was never imported."""
    if _MODULE not in sys.modules:
        return []
    found = [getattr(each, "_handle", None) for each in module.modules()]
    handle_class = sys.modules[_MODULE].FlatParamHandle
    handles = {id(each): each for each in found if isinstance(each, handle_class)}  # wrappers show that of their inside
    return [_parts(handle) for handle in handles.values()]


def _parts(handle: Any) -> FlatParameterParts:
    flat = handle.flat_param
    ends = list(accumulate(flat._numels_with_padding))
    places = [
        (end - numel, numel)
        for end, numel, is_padding in zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
        if not is_padding
    ]
    originals = flat._params if handle._use_orig_params else [None] * len(places)
    pieces = tuple(
        FlatPiece(
            name=name,
            numel=int(numel),
            offset=int(offset),
            local_start=info.offset_in_shard or 0,
            start=info.intra_param_start_idx or 0,
            length=info.numel_in_shard or 0,
            original=original,
        )
        for name, (offset, numel), info, original in zip(
            flat._fqns, places, flat._shard_param_infos, originals, strict=True
        )
    )
    return FlatParameterParts(parameter=flat, is_sharded=bool(handle.uses_sharded_strategy), pieces=pieces)
