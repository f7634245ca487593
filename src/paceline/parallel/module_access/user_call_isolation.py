"""Forwards that only look, as planning runs them: after them the user's model is as it was."""

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
    """Run forwards inside; afterwards the model's attributes, buffers and parameters and the generators are as before.

    Attributes are what modules keep in plain Python: numbers, texts, lists, dicts and sets (in each other too),
    tensors, arrays, generators, and modules that are not registered; objects of other classes are not looked into.
    A parameter is copied when an operation is about to write to it; these are given, with what they were. Without
    `parameters` that is not looked for.
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
    """Call a function of the user's inside; afterwards what it keeps in Python is as before.

    That is what it closes over, or an object's attributes. Modules, and tensors and containers that are too large for
    a running state, are taken to be only read.
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
    """What these modules keep in plain Python: numbers, texts, and what is in their containers and small objects."""
    known: dict[int, Any] = {}
    return {
        f"{name}.{key}".lstrip("."): plain_value(value, known)
        for name, module in modules.items()
        for key, value in {**vars(type(module)), **vars(module)}.items()
        if not (key in _TORCH or key.startswith("__")) and is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, nothing, a container, or an object of a class that keeps what it is given."""
    if value is None or isinstance(value, (*_PLAIN, *_NUMBERS)):
        return True
    kind = type(value)
    is_foreign = kind.__module__.partition(".")[0] in _FOREIGN or isinstance(value, type | ModuleType | nn.Module)
    return hasattr(value, "__dict__") and not is_foreign and not callable(value)


def plain_value(value: Any, known: dict[int, Any]) -> Any:
    """What two of them that are equal are equal in; of a long container its length, of what is not plain its class."""
    if isinstance(value, np.generic):
        return plain_value(value.item(), known)
    if isinstance(value, float | complex):
        return value if value == value else "nan"
    if value is None or isinstance(value, bool | int | str):
        return value
    if not is_plain(value):
        return type(value).__name__
    if id(value) not in known:
        known[id(value)] = type(value).__name__  # for one that holds itself
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
    """Copies a parameter before the first operation that writes to its memory."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before: list[tuple[nn.Parameter, Tensor]] = []
        self._sharing: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._sharing.setdefault(storage_key(parameter), []).append(parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy, then run it."""
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs or {}):
                for parameter in self._sharing.pop(storage_key(tensor), ()):
                    self.before.append((parameter, parameter.detach().clone()))
        return func(*args, **(kwargs or {}))


class _Kept:
    """What modules keep, and how each of it is put back. `without` are memories that are looked after elsewhere."""

    def __init__(self, without: Iterator[int]) -> None:
        self._known: dict[int, object] = {}
        self._undos: list[Callable[[], object]] = []
        self._without = frozenset(without)

    def keep(self, value: Any) -> None:
        """A module or a value of one, with all that is in it."""
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
        """All of it as it was."""
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
    """Without modules and what is large, by itself or together with what came before."""

    def __init__(self) -> None:
        super().__init__(iter(()))
        self._left = 16 * _MOST

    def keep(self, value: Any) -> None:
        """A value with all that is in it."""
        size = _size(value)
        if not isinstance(value, nn.Module) and size <= min(_MOST, self._left):
            self._left -= size
            super().keep(value)

    def keep_cells(self, cells: Sequence[CellType]) -> None:
        """What names a function closes over, and what they stand for."""
        for cell in cells:
            with suppress(ValueError):  # one that has no value yet
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
    """Give a container what was in it, in the same order; one that still has it is left alone."""
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
