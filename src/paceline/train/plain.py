"""State dicts as JSON: tuples, number keys and small tensors survive the way there and back."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import CheckpointError

_TAG = "__paceline__"
_MOST_ELEMENTS = 4096


def to_plain(value: Any, *, where: str) -> Any:
    """JSON for a value out of somebody's `state_dict`; functions and classes are left to be made anew."""
    if value is None or isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() > _MOST_ELEMENTS:
            raise CheckpointError(f"{where} holds a tensor of {value.numel()} elements outside the parameters.")
        return {_TAG: "tensor", "dtype": str(value.dtype)[6:], "value": value.detach().cpu().tolist()}
    if isinstance(value, Mapping):
        pairs = [[to_plain(k, where=where), to_plain(v, where=where)] for k, v in value.items()]
        if all(isinstance(k, str) for k in value) and not isinstance(value, Counter):
            return dict(pairs)
        return {_TAG: "counter" if isinstance(value, Counter) else "pairs", "value": pairs}
    if isinstance(value, list):
        return [to_plain(item, where=where) for item in value]
    if isinstance(value, tuple | set | frozenset):
        return {_TAG: "tuple", "value": [to_plain(item, where=where) for item in value]}
    return {_TAG: "made anew", "value": type(value).__name__}


def from_plain(value: Any) -> Any:
    """The value again."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: from_plain(item) for key, item in value.items()}
    if tag == "tensor":
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]))
    if tag in ("pairs", "counter"):
        found = {from_plain(k): from_plain(v) for k, v in value["value"]}
        return Counter(found) if tag == "counter" else found
    if tag == "tuple":
        return tuple(from_plain(item) for item in value["value"])
    return None


def without_anew(value: Any) -> Any:
    """The same state without what can only be made anew."""
    if isinstance(value, Mapping) and value.get(_TAG) is None:
        kept = {key: item for key, item in value.items() if not _is_anew(item)}
        return {key: without_anew(item) for key, item in kept.items()}
    return value


def _is_anew(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get(_TAG) == "made anew"


def made_anew(value: Any) -> str:
    """The first kind of value in it that JSON can't hold, or nothing."""
    if _is_anew(value):
        return str(value["value"])
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return next((kind for item in inner if (kind := made_anew(item))), "")
