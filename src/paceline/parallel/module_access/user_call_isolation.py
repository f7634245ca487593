"""Calls of user code without side effects, for planning: afterwards the model is unchanged."""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import CellType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.parallel.module_access.tensor_access import copy_into
from paceline.torch_internals.dispatch_modes import DispatchMode, hide_from_modes, written_tensors
from paceline.torch_internals.private_api import storage_key
from paceline.torch_internals.rng import preserve_rng

_TORCH = frozenset(vars(nn.Module()))
_MOST = 1 << 16
_SHORT = 256
_NUMBERS = (bool, int, float, complex, str, np.generic, tuple, frozenset)
_FOREIGN = {"torch", "numpy", "paceline"}
_PLAIN = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


@contextmanager
def side_effect_free(model: nn.Module, *, parameters: bool = True) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Restore the model's attributes, buffers, parameters and the random generators at the end of this context.

    Attributes are restored if they are numbers, strings, lists, dicts and sets (nested too), tensors, arrays,
    generators, or unregistered modules; objects of other classes are not inspected. A parameter is copied when an
    operation is about to write to it; the context yields these parameters with their old values. Without `parameters`,
    writes to parameters are not detected.
    """
    weights = list(model.parameters()) if parameters else []
    memory = [(parameter, parameter.data) for parameter in weights]
    kept = _Kept(storage_key(parameter) for parameter in weights)
    kept.keep(model)
    with preserve_rng(), ExitStack() as stack:
        before = stack.enter_context(_Writes(weights)).before if weights else []
        try:
            yield before
        finally:
            with hide_from_modes():
                kept.put_back()
                for parameter, data in memory:
                    if storage_key(parameter) != storage_key(data):
                        parameter.data = data
                for parameter, value in before:
                    copy_into(parameter.data, value)


@contextmanager
def call_stateless(function: object) -> Iterator[None]:
    """Restore the Python state of a user's function at the end of this context.

    The state is the function's closure, or its object's attributes. Modules and large tensors and containers are
    assumed to be read only.
    """
    kept = _Small()
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, type | ModuleType) and hasattr(owner, "__dict__"):
        kept.keep(vars(owner))
    kept.keep_cells(getattr(function, "__closure__", None) or ())
    try:
        yield
    finally:
        with hide_from_modes():
            kept.put_back()


def plain_state(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the modules' plain Python state: numbers, strings, and the contents of containers and objects."""
    known: dict[int, Any] = {}
    return {
        f"{name}.{key}".lstrip("."): plain_value(value, known)
        for name, module in modules.items()
        for key, value in {**vars(type(module)), **vars(module)}.items()
        if not (key in _TORCH or key.startswith("__")) and is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, None, a container, or a non-callable object with attributes."""
    if value is None or isinstance(value, (*_PLAIN, *_NUMBERS)):
        return True
    kind = type(value)
    is_foreign = kind.__module__.partition(".")[0] in _FOREIGN or isinstance(value, type | ModuleType | nn.Module)
    return hasattr(value, "__dict__") and not is_foreign and not callable(value)


def plain_value(value: Any, known: dict[int, Any]) -> Any:
    """Return a comparable form of a value: the length of a long container, the class name if it is not plain."""
    if isinstance(value, np.generic):
        return plain_value(value.item(), known)
    if isinstance(value, float | complex):
        return value if value == value else "nan"
    if value is None or isinstance(value, bool | int | str):
        return value
    if not is_plain(value):
        return type(value).__name__
    if id(value) not in known:
        known[id(value)] = type(value).__name__  # for a container that contains itself
        inner = value if isinstance(value, (*_PLAIN, tuple, frozenset)) else vars(value)
        if len(inner) > _SHORT:
            known[id(value)] = len(inner)
        elif isinstance(inner, dict):
            known[id(value)] = {key: plain_value(part, known) for key, part in inner.items()}
        elif isinstance(inner, set | frozenset):
            known[id(value)] = {str(part) for part in inner}
        else:
            known[id(value)] = [plain_value(part, known) for part in inner]
    return known[id(value)]


class _Writes(DispatchMode):
    """A dispatch mode that copies a parameter before the first operation that writes to its memory."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[tuple[nn.Parameter, Tensor]] = []
        self._sharing: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._sharing.setdefault(storage_key(parameter), []).append(parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the parameters that `func` writes to, then run it."""
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs or {}):
                for parameter in self._sharing.pop(storage_key(tensor), ()):
                    self.before.append((parameter, parameter.detach().clone()))
        return func(*args, **(kwargs or {}))


class _Kept:
    """A snapshot of module attributes, with a function to restore each. `without`: storages that are skipped."""

    def __init__(self, without: Iterator[int]) -> None:
        self._known: dict[int, object] = {}
        self._undos: list[Callable[[], object]] = []
        self._without = frozenset(without)

    def keep(self, value: Any) -> None:
        """Save a module, or an attribute's value, with all values inside it."""
        if id(value) in self._known:
            return
        if isinstance(value, nn.Module):
            self._known[id(value)] = value
            self.keep(vars(value))
        elif type(value) in _PLAIN or isinstance(value, tuple):
            self._known[id(value)] = value
            inner = _inner(value)
            if not isinstance(value, tuple):
                self._undos.append(lambda: _refill(value, inner))
            for part in inner:
                self.keep(part)
        elif (undo := self._undo(value)) is not None:
            self._known[id(value)] = value
            self._undos.append(undo)

    def put_back(self) -> None:
        """Restore all saved values."""
        for undo in self._undos:
            undo()

    def _undo(self, value: Any) -> Callable[[], object] | None:
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or value.layout is not torch.strided:
                return None
            if storage_key(value) in self._without:
                return None
            old = value.detach().clone()
            return lambda: None if not old.is_meta and torch.equal(value, old) else copy_into(value.data, old)
        if isinstance(value, np.ndarray):
            array = value.copy()
            return lambda: np.copyto(value, array) if value.flags.writeable else None
        if isinstance(value, random.Random):
            state = value.getstate()
            return lambda: value.setstate(state)
        if isinstance(value, np.random.Generator):
            drawn = value.bit_generator.state
            return lambda: setattr(value.bit_generator, "state", drawn)
        if isinstance(value, torch.Generator):
            at = value.get_state()
            return lambda: value.set_state(at)
        return None


class _Small(_Kept):
    """A snapshot without modules and without large values; the total size is limited too."""

    def __init__(self) -> None:
        super().__init__(iter(()))
        self._left = 16 * _MOST

    def keep(self, value: Any) -> None:
        """Save a value with all values inside it, unless it is too large."""
        size = _size(value)
        if not isinstance(value, nn.Module) and size <= min(_MOST, self._left):
            self._left -= size
            super().keep(value)

    def keep_cells(self, cells: Sequence[CellType]) -> None:
        """Save the contents of a function's closure cells."""
        for cell in cells:
            with suppress(ValueError):  # a cell that has no value yet
                value = cell.cell_contents
                self._undos.append(partial(setattr, cell, "cell_contents", value))
                self.keep(value)


def _inner(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return int(value.size) if isinstance(value, np.ndarray) else len(value) if type(value) in _PLAIN else 0


def _refill(value: Any, inner: list[Any]) -> None:
    """Restore a container's contents in the same order, unless they are unchanged."""
    now = _inner(value)
    if len(now) == len(inner) and all(new is old for new, old in zip(now, inner, strict=True)):
        return
    value.clear()
    if isinstance(value, dict):
        half = len(inner) // 2
        value.update(zip(inner[:half], inner[half:], strict=True))
    elif isinstance(value, set):
        value.update(inner)
    else:
        value.extend(inner)
