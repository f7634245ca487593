"""State dicts as JSON. Numbers of every type, tuples, keys that are numbers, and small tensors can be read back.

Functions, classes and other objects can't be written without pickle: they are unwritable. The job creates them again on
a resume.
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
_UNWRITABLE = "made anew"  # written to files, so a change would make old checkpoints unreadable
_MAX_ELEMENTS = 4096
_NUMPY_KINDS = "biufc"

_COLLECTIONS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}

StoreTensor = Callable[[Tensor], str | None]
FetchTensor = Callable[[str], Tensor]


def encode_state(value: Any, *, where: str, store: StoreTensor | None = None) -> Any:
    """Return JSON for a value of a `state_dict`. An unwritable value, such as a function or a class, becomes a marker.

    `where` names the value in an error. `store` saves a tensor elsewhere and returns its name there. A small tensor
    becomes JSON if there is no `store`, or if `store` returns None.

    Raises:
        CheckpointError: a tensor is large, and `store` is missing or returns None.
    """
    if isinstance(value, np.ndarray | np.generic):
        return _encode_numpy(value)
    if value is None or type(value) in (bool, int, str, float):
        return value
    if isinstance(value, Enum | torch.dtype | torch.device):
        return {_TAG: _UNWRITABLE, "value": type(value).__name__, "is": str(value)}
    if isinstance(value, bool | int | str | float):
        return value
    if isinstance(value, complex):
        return {_TAG: "complex", "value": [value.real, value.imag]}
    if isinstance(value, Tensor):
        if store is not None and (value.layout is not torch.strided or value.is_quantized):
            return {_TAG: _UNWRITABLE, "value": "quantized tensor" if value.is_quantized else "sparse tensor"}
        name = None if store is None else store(value)
        return _encode_tensor(value, where) if name is None else {_TAG: "stored", "value": name}
    if isinstance(value, Mapping):
        pairs = [[encode_state(k, where=where), encode_state(v, where=where, store=store)] for k, v in value.items()]
        if all(isinstance(k, str) for k in value) and not isinstance(value, Counter):
            return dict(pairs)
        return {_TAG: "counter" if isinstance(value, Counter) else "pairs", "value": pairs}
    if isinstance(value, list):
        return [encode_state(item, where=where, store=store) for item in value]
    if isinstance(value, tuple | set | frozenset | deque):
        kind = next(name for name, collection in _COLLECTIONS.items() if isinstance(value, collection))
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        encoded = {_TAG: kind, "value": [encode_state(item, where=where, store=store) for item in items]}
        return {**encoded, "maxlen": value.maxlen} if isinstance(value, deque) else encoded
    return {_TAG: _UNWRITABLE, "value": type(value).__name__}


def decode_state(value: Any, *, fetch: FetchTensor | None = None) -> Any:
    """Return the value that `encode_state` has encoded; `fetch` returns the tensor that `store` saved under a name.

    Raises:
        CheckpointError: JSON that `encode_state` doesn't write.
    """
    try:
        return _decode(value, fetch)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"a value of the state can't be read: {error}") from error


def _decode(value: Any, fetch: FetchTensor | None) -> Any:
    if isinstance(value, list):
        return [decode_state(item, fetch=fetch) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag, inner = value.get(_TAG), value.get("value")
    if tag is None:
        return {key: decode_state(item, fetch=fetch) for key, item in value.items()}
    if tag == "tensor":
        return _decode_tensor(value)
    if tag == "numpy":
        return _decode_numpy(value)
    if tag == "complex":
        return complex(*value["value"])
    if tag == "stored" and fetch is not None:
        return fetch(value["value"])
    if tag in ("pairs", "counter"):
        decoded = {decode_state(k, fetch=fetch): decode_state(v, fetch=fetch) for k, v in value["value"]}
        return Counter(decoded) if tag == "counter" else decoded
    if tag == "deque":
        return deque((decode_state(item, fetch=fetch) for item in inner or ()), maxlen=value.get("maxlen"))
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](decode_state(item, fetch=fetch) for item in inner or ())
    return None


def remove_unwritable_values(value: Any) -> Any:
    """Return encoded state without the values that could not be written.

    A list, tuple, set or deque with such an element is left out completely.
    """
    if isinstance(value, Mapping) and value.get(_TAG) is None:
        return {key: remove_unwritable_values(item) for key, item in value.items() if not _is_unwritable(item)}
    return [remove_unwritable_values(item) for item in value] if isinstance(value, list) else value


def unwritable_kind(value: Any) -> str:
    """Return the type of the first value in encoded state that could not be written, or an empty string."""
    if isinstance(value, Mapping) and value.get(_TAG) == _UNWRITABLE:
        return str(value["value"])
    inner = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return next((kind for item in inner if (kind := unwritable_kind(item))), "")


def normalize_numbers(value: Any) -> Any:
    """Return the value independent of number types: `np.float64(0.1)` and 0.1 give the same result."""
    if isinstance(value, list):
        return [normalize_numbers(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag, inner = value.get(_TAG), value.get("value")
    if tag in ("tensor", "numpy"):
        while isinstance(inner, list) and len(inner) == 1:
            inner = inner[0]
        return inner
    if tag == _UNWRITABLE:
        return value.get("is")
    if tag in _COLLECTIONS:  # earlier versions wrote every collection as a tuple
        return {_TAG: "tuple", "value": normalize_numbers(inner)}
    return {key: normalize_numbers(item) for key, item in value.items()}


def _is_unwritable(item: Any) -> bool:
    """Return whether the item, or an element of it if it is a collection, could not be written."""
    if isinstance(item, Mapping):
        inner = item.get("value")
        return item.get(_TAG) == _UNWRITABLE or (item.get(_TAG) in _COLLECTIONS and _is_unwritable(inner))
    return isinstance(item, list) and any(_is_unwritable(element) for element in item)


def _encode_numpy(value: Any) -> dict[str, Any]:
    if value.dtype.kind not in _NUMPY_KINDS or value.size > _MAX_ELEMENTS or value.dtype.itemsize > 16:
        return {_TAG: _UNWRITABLE, "value": type(value).__name__}
    is_complex = value.dtype.kind == "c"
    inner = np.stack([value.real, value.imag], axis=-1).tolist() if is_complex else value.tolist()
    shape = list(value.shape) if isinstance(value, np.ndarray) else None
    return {_TAG: "numpy", "dtype": value.dtype.name, "shape": shape, "value": inner}


def _decode_numpy(value: Mapping[str, Any]) -> Any:
    dtype, shape = np.dtype(value["dtype"]), value["shape"]
    array = np.array(value["value"])
    if dtype.kind == "c":
        array = (array[..., 0] + 1j * array[..., 1]) if array.size else array
    array = array.astype(dtype)
    return dtype.type(array.item()) if shape is None else array.reshape(shape)


def _encode_tensor(value: Tensor, where: str) -> dict[str, Any]:
    if value.numel() > _MAX_ELEMENTS:
        raise CheckpointError(f"{where} contains a tensor of {value.numel()} elements that is not a parameter.")
    value = value.detach().cpu()
    value = value.to_dense() if value.layout is not torch.strided else value
    flat = torch.view_as_real(value) if value.is_complex() else value
    encoded = {_TAG: "tensor", "dtype": str(value.dtype)[6:], "value": flat.tolist()}
    return encoded if value.numel() else {**encoded, "shape": list(value.shape)}


def _decode_tensor(value: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, value["dtype"])
    if dtype.is_complex:
        real = torch.tensor(value["value"], dtype=torch.empty((), dtype=dtype).real.dtype)
        tensor = (
            torch.view_as_complex(real.reshape(*real.shape[:-1], 2)) if real.numel() else torch.empty(0, dtype=dtype)
        )
    else:
        tensor = torch.tensor(value["value"], dtype=dtype)
    return tensor.reshape(value["shape"]) if "shape" in value else tensor
