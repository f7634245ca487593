"""Conversion of a dataset's own state to JSON and back. A state that can't be converted without loss is refused."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_TAG = "__kind__"  # the key that marks a JSON object as a value of another type


class NotJsonConvertible(Exception):
    """The error for a value that cannot be converted to JSON without loss; the message names its type."""


def to_json(value: Any) -> Any:
    """Return JSON that `from_json` converts back to an equal value.

    Raises:
        NotJsonConvertible: `value` is or contains an object of another type than numbers, text, bytes, lists, tuples,
            mappings, arrays and tensors.
    """
    if value is None or type(value) in (bool, int, str, float):
        return value
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [to_json(item) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(name, str) for name in value) and _TAG not in value:
            return {name: to_json(item) for name, item in value.items()}
        return {_TAG: "pairs", "items": [[to_json(name), to_json(item)] for name, item in value.items()]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "text": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "array": _array_to_json(value.detach().cpu().numpy())}
    if isinstance(value, np.generic):
        return {_TAG: "scalar", "array": _array_to_json(np.asarray(value))}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {_TAG: "array", "array": _array_to_json(value)}
    raise NotJsonConvertible(f"a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """Return the value that `to_json` converted."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {name: from_json(item) for name, item in value.items()}
    if kind == "tuple":
        return tuple(from_json(item) for item in value["items"])
    if kind == "pairs":
        return {from_json(name): from_json(item) for name, item in value["items"]}
    if kind == "bytes":
        return base64.b64decode(value["text"])
    array = _array_from_json(value["array"])
    if kind == "tensor":
        return torch.from_numpy(array)
    return array[()] if kind == "scalar" else array


def _array_to_json(value: Any) -> dict[str, Any]:
    encoded = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.str, "shape": list(value.shape), "text": encoded}


def _array_from_json(value: Mapping[str, Any]) -> Any:
    flat = np.frombuffer(base64.b64decode(value["text"]), dtype=np.dtype(value["dtype"]))
    return flat.reshape(value["shape"]).copy()
