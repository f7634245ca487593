"""Compute fingerprints of module attributes that hold state: lists, objects, generators, unregistered tensors."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.parallel.module_access.tensor_access import bits_checksum
from paceline.parallel.module_access.user_call_isolation import plain_state, plain_value

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def attribute_fingerprints(model: nn.Module) -> dict[str, Any]:
    """Return comparable values of the attributes of `model`'s modules that a forward may change, by attribute name.

    Parameters, buffers, submodules and tensors that require gradients are left out.
    """
    modules = dict(model.named_modules())
    return plain_state(modules) | {
        f"{name}.{key}".lstrip("."): value
        for name, module in modules.items()
        for key, value in _attribute_values(module)
    }


def _attribute_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key in _MODULE_ATTRIBUTES or isinstance(value, nn.Module | nn.Parameter):
            continue
        fingerprint = _fingerprint(value)
        if fingerprint is not None:
            yield key, fingerprint


def _fingerprint(value: Any) -> Any:
    """Return a comparable value of a tensor, array, generator, iterator or callable object; None for other values."""
    if isinstance(value, Tensor):
        if value.requires_grad or value.layout is not torch.strided or type(value) is not Tensor or value.is_meta:
            return None
        return [list(value.shape), int(bits_checksum(value))]
    if isinstance(value, np.ndarray):
        return [list(value.shape), hash(value.tobytes())]
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes())  # a checksum can stay the same after one draw
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return hash(str(value.get_state(legacy=False)))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, itertools.count | itertools.cycle):
        return repr(value)
    is_helper = callable(value) and hasattr(value, "__dict__") and not isinstance(value, type) and vars(value)
    return plain_value(dict(vars(value)), {}) if is_helper else None
