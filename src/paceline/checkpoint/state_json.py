"""State dicts as JSON: every kind of number, tuples, number keys and small tensors survive the round trip.

Functions, classes and other objects can't be written without pickle. They stay as the job makes them.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError

_TAG = "__paceline__"
_JOB_CREATED = "made anew"  # stands in files: another word would make old checkpoints unreadable
_MOST_ELEMENTS = 4096
_NUMPY_KINDS = "biufc"

_SEVERAL: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}

Keep = Callable[[Tensor], str | None]
Find = Callable[[str], Tensor]


def to_plain(value: Any, *, where: str, keep: Keep | None = None) -> Any:
    """Return JSON for a value of a `state_dict`; functions and classes are left out, and the job creates them again.

    `keep` stores a tensor elsewhere and returns its name there; without it, or for a tensor that it does not take, a
    small tensor becomes JSON as well.

    Raises:
        CheckpointError: a large tensor, and no `keep`.
    """
    if isinstance(value, np.ndarray | np.generic):
        return _numpy(value)
    if value is None or type(value) in (bool, int, str, float):
        return value
    if isinstance(value, Enum | torch.dtype | torch.device):
        return {_TAG: _JOB_CREATED, "value": type(value).__name__, "is": str(value)}
    if isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, complex):
        return {_TAG: "complex", "value": [value.real, value.imag]}
    if isinstance(value, Tensor):
        if keep is not None and (value.layout is not torch.strided or value.is_quantized):
            return {_TAG: _JOB_CREATED, "value": "quantized tensor" if value.is_quantized else "sparse tensor"}
        name = None if keep is None else keep(value)
        return _tensor(value, where) if name is None else {_TAG: "stored", "value": name}
    if isinstance(value, Mapping):
        pairs = [[to_plain(k, where=where), to_plain(v, where=where, keep=keep)] for k, v in value.items()]
        if all(isinstance(k, str) for k in value) and not isinstance(value, Counter):
            return dict(pairs)
        return {_TAG: "counter" if isinstance(value, Counter) else "pairs", "value": pairs}
    if isinstance(value, list):
        return [to_plain(item, where=where, keep=keep) for item in value]
    if isinstance(value, tuple | set | frozenset | deque):
        kind = next(name for name, one in _SEVERAL.items() if isinstance(value, one))
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        found = {_TAG: kind, "value": [to_plain(item, where=where, keep=keep) for item in items]}
        return {**found, "maxlen": value.maxlen} if isinstance(value, deque) else found
    return {_TAG: _JOB_CREATED, "value": type(value).__name__}


def from_plain(value: Any, *, find: Find | None = None) -> Any:
    """Return the value that `to_plain` converted; `find` returns a tensor that `keep` has stored.

    Raises:
        CheckpointError: a text that `to_plain` doesn't write.
    """
    try:
        return _again(value, find)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"a value of the state can't be read: {error}") from error


def _again(value: Any, find: Find | None) -> Any:
    if isinstance(value, list):
        return [from_plain(item, find=find) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag, inner = value.get(_TAG), value.get("value")
    if tag is None:
        return {key: from_plain(item, find=find) for key, item in value.items()}
    if tag == "tensor":
        return _tensor_again(value)
    if tag == "numpy":
        return _numpy_again(value)
    if tag == "complex":
        return complex(*value["value"])
    if tag == "stored" and find is not None:
        return find(value["value"])
    if tag in ("pairs", "counter"):
        found = {from_plain(k, find=find): from_plain(v, find=find) for k, v in value["value"]}
        return Counter(found) if tag == "counter" else found
    if tag == "deque":
        return deque((from_plain(item, find=find) for item in inner or ()), maxlen=value.get("maxlen"))
    if tag in _SEVERAL:
        return _SEVERAL[tag](from_plain(item, find=find) for item in inner or ())
    return None


def without_job_created(value: Any) -> Any:
    """Return the state without values that only the job can create; a list with such a value is left out too."""
    if isinstance(value, Mapping) and value.get(_TAG) is None:
        return {key: without_job_created(item) for key, item in value.items() if not _is_job_created(item)}
    return [without_job_created(item) for item in value] if isinstance(value, list) else value


def job_created_kind(value: Any) -> str:
    """Return the first kind of value in it that JSON can't hold, or an empty string."""
    if isinstance(value, Mapping) and value.get(_TAG) == _JOB_CREATED:
        return str(value["value"])
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return next((kind for item in inner if (kind := job_created_kind(item))), "")


def normalized_numbers(value: Any) -> Any:
    """Return the value independent of number types: `np.float64(0.1)` and 0.1 give the same."""
    if isinstance(value, list):
        return [normalized_numbers(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag, inner = value.get(_TAG), value.get("value")
    if tag in ("tensor", "numpy"):
        while isinstance(inner, list) and len(inner) == 1:
            inner = inner[0]
        return inner
    if tag == _JOB_CREATED:
        return value.get("is")
    if tag in _SEVERAL:  # which earlier versions wrote as tuples
        return {_TAG: "tuple", "value": normalized_numbers(inner)}
    return {key: normalized_numbers(item) for key, item in value.items()}


def _is_job_created(item: Any) -> bool:
    """Return whether only the job can create the item, or an element of it if it is a list or tuple."""
    if isinstance(item, Mapping):
        inner = item.get("value")
        return item.get(_TAG) == _JOB_CREATED or (item.get(_TAG) in _SEVERAL and _is_job_created(inner))
    return isinstance(item, list) and any(_is_job_created(one) for one in item)


def _numpy(value: Any) -> dict[str, Any]:
    if value.dtype.kind not in _NUMPY_KINDS or value.size > _MOST_ELEMENTS or value.dtype.itemsize > 16:
        return {_TAG: _JOB_CREATED, "value": type(value).__name__}
    is_complex = value.dtype.kind == "c"
    inner = np.stack([value.real, value.imag], axis=-1).tolist() if is_complex else value.tolist()
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    return {_TAG: "numpy", "dtype": value.dtype.name, "shape": shape, "value": inner}


def _numpy_again(value: Mapping[str, Any]) -> Any:
    kind, shape = np.dtype(value["dtype"]), value["shape"]
    found = np.array(value["value"])
    if kind.kind == "c":
        found = (found[..., 0] + 1j * found[..., 1]) if found.size else found
    found = found.astype(kind)
    return kind.type(found.item()) if shape is None else found.reshape(shape)


def _tensor(value: Tensor, where: str) -> dict[str, Any]:
    if value.numel() > _MOST_ELEMENTS:
        raise CheckpointError(f"{where} contains a tensor of {value.numel()} elements that is not a parameter.")
    value = value.detach().cpu()
    value = value.to_dense() if value.layout is not torch.strided else value
    flat = torch.view_as_real(value) if value.is_complex() else value
    found = {_TAG: "tensor", "dtype": str(value.dtype)[6:], "value": flat.tolist()}
    return found if value.numel() else {**found, "shape": list(value.shape)}


def _tensor_again(value: Mapping[str, Any]) -> Tensor:
    kind = getattr(torch, value["dtype"])
    if kind.is_complex:
        real = torch.tensor(value["value"], dtype=torch.empty((), dtype=kind).real.dtype)
        found = torch.view_as_complex(real.reshape(*real.shape[:-1], 2)) if real.numel() else torch.empty(0, dtype=kind)
    else:
        found = torch.tensor(value["value"], dtype=kind)
    return found.reshape(value["shape"]) if "shape" in value else found
