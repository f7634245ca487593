"""Call user code without side effects, for planning: afterwards the model is unchanged."""

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
from typing_extensions import override

from paceline.parallel.module_access.tensor_access import copy_into
from paceline.torch_internals.dispatch_modes import DispatchMode, hide_from_modes, written_tensors
from paceline.torch_internals.private_api import storage_key
from paceline.torch_internals.rng import preserve_rng

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_MAX_NUMEL = 1 << 16
_MAX_COMPARED_LENGTH = 256
_IMMUTABLE_TYPES = (bool, int, float, complex, str, np.generic, tuple, frozenset)
_FOREIGN_PACKAGES = {"torch", "numpy", "paceline"}
_CONTAINER_TYPES = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


@contextmanager
def side_effect_free(model: nn.Module, *, parameters: bool = True) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Restore the model's attributes, buffers, parameters and the random generators at the end of this context.

    Attributes are restored if they are numbers, strings, lists, dicts and sets (nested too), tensors, arrays,
    generators, or unregistered modules; objects of other classes are not inspected. A parameter is copied when an
    operation is about to write to it; the context yields these parameters with their old values. If `parameters` is
    False, writes to parameters are not detected.
    """
    weights = list(model.parameters()) if parameters else []
    old_data = [(parameter, parameter.data) for parameter in weights]
    snapshot = _Snapshot(storage_key(parameter) for parameter in weights)
    snapshot.save(model)
    with preserve_rng(), ExitStack() as stack:
        old_values = stack.enter_context(_WriteRecorder(weights)).old_values if weights else []
        try:
            yield old_values
        finally:
            with hide_from_modes():
                snapshot.restore()
                for parameter, data in old_data:
                    if storage_key(parameter) != storage_key(data):
                        parameter.data = data
                for parameter, value in old_values:
                    copy_into(parameter.data, value)


@contextmanager
def call_stateless(function: object) -> Iterator[None]:
    """Restore the Python state of a user's function at the end of this context.

    The state is the function's closure, or its object's attributes. Modules, large tensors and large containers
    are assumed not to change.
    """
    snapshot = _SmallSnapshot()
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, type | ModuleType) and hasattr(owner, "__dict__"):
        snapshot.save(vars(owner))
    snapshot.save_cells(getattr(function, "__closure__", None) or ())
    try:
        yield
    finally:
        with hide_from_modes():
            snapshot.restore()


def plain_state(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the modules' plain Python state: numbers, strings, and the contents of containers and objects."""
    known: dict[int, Any] = {}
    return {
        f"{name}.{key}".lstrip("."): plain_value(value, known)
        for name, module in modules.items()
        for key, value in {**vars(type(module)), **vars(module)}.items()
        if not (key in _MODULE_ATTRIBUTES or key.startswith("__")) and is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, None, a container, or a non-callable object with attributes."""
    if value is None or isinstance(value, (*_CONTAINER_TYPES, *_IMMUTABLE_TYPES)):
        return True
    kind = type(value)
    is_foreign = kind.__module__.partition(".")[0] in _FOREIGN_PACKAGES or isinstance(
        value, type | ModuleType | nn.Module
    )
    return hasattr(value, "__dict__") and not is_foreign and not callable(value)


def plain_value(value: Any, known: dict[int, Any]) -> Any:
    """Return a comparable form of a value.

    A long container is replaced by its length, and a value that is not plain by the name of its class. `known` caches
    the forms of containers and objects by their ids.
    """
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
        contents = value if isinstance(value, (*_CONTAINER_TYPES, tuple, frozenset)) else vars(value)
        if len(contents) > _MAX_COMPARED_LENGTH:
            known[id(value)] = len(contents)
        elif isinstance(contents, dict):
            known[id(value)] = {key: plain_value(part, known) for key, part in contents.items()}
        elif isinstance(contents, set | frozenset):
            known[id(value)] = {str(part) for part in contents}
        else:
            known[id(value)] = [plain_value(part, known) for part in contents]
    return known[id(value)]


class _WriteRecorder(DispatchMode):
    """A dispatch mode that copies a parameter before the first operation that writes to its memory."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.old_values: list[tuple[nn.Parameter, Tensor]] = []
        self._parameters_by_storage: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._parameters_by_storage.setdefault(storage_key(parameter), []).append(parameter)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the parameters that `func` writes to, then run it."""
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor in written_tensors(func, args, kwargs or {}):
                for parameter in self._parameters_by_storage.pop(storage_key(tensor), ()):
                    self.old_values.append((parameter, parameter.detach().clone()))
        return func(*args, **(kwargs or {}))


class _Snapshot:
    """A snapshot of module attributes, with a function to restore each; tensors in `skipped_storages` are not saved."""

    def __init__(self, skipped_storages: Iterator[int]) -> None:
        self._saved: dict[int, object] = {}
        self._undos: list[Callable[[], object]] = []
        self._skipped_storages = frozenset(skipped_storages)

    def save(self, value: Any) -> None:
        """Save a module, or an attribute's value, with all values inside it."""
        if id(value) in self._saved:
            return
        if isinstance(value, nn.Module):
            self._saved[id(value)] = value
            self.save(vars(value))
        elif type(value) in _CONTAINER_TYPES or isinstance(value, tuple):
            self._saved[id(value)] = value
            contents = _contents(value)
            if not isinstance(value, tuple):
                self._undos.append(lambda: _restore_container(value, contents))
            for part in contents:
                self.save(part)
        elif (undo := self._restore_function(value)) is not None:
            self._saved[id(value)] = value
            self._undos.append(undo)

    def restore(self) -> None:
        """Restore all saved values."""
        for undo in self._undos:
            undo()

    def _restore_function(self, value: Any) -> Callable[[], object] | None:
        """Return a function that restores a tensor, an array or a random generator; None for other values."""
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or value.layout is not torch.strided:
                return None
            if storage_key(value) in self._skipped_storages:
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
            generator_state = value.bit_generator.state
            return lambda: setattr(value.bit_generator, "state", generator_state)
        if isinstance(value, torch.Generator):
            torch_state = value.get_state()
            return lambda: value.set_state(torch_state)
        return None


class _SmallSnapshot(_Snapshot):
    """A snapshot without modules and without large values; the total size is limited too."""

    def __init__(self) -> None:
        super().__init__(iter(()))
        self._remaining_numel = 16 * _MAX_NUMEL

    @override
    def save(self, value: Any) -> None:
        """Save a value with all values inside it, unless it is too large."""
        size = _num_elements(value)
        if not isinstance(value, nn.Module) and size <= min(_MAX_NUMEL, self._remaining_numel):
            self._remaining_numel -= size
            super().save(value)

    def save_cells(self, cells: Sequence[CellType]) -> None:
        """Save the contents of a function's closure cells."""
        for cell in cells:
            with suppress(ValueError):  # a cell that has no value yet
                value = cell.cell_contents
                self._undos.append(partial(setattr, cell, "cell_contents", value))
                self.save(value)


def _contents(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _num_elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return int(value.size) if isinstance(value, np.ndarray) else len(value) if type(value) in _CONTAINER_TYPES else 0


def _restore_container(value: Any, contents: list[Any]) -> None:
    """Restore a container's contents in the same order, unless they are unchanged."""
    current = _contents(value)
    if len(current) == len(contents) and all(new is old for new, old in zip(current, contents, strict=True)):
        return
    value.clear()
    if isinstance(value, dict):
        half = len(contents) // 2
        value.update(zip(contents[:half], contents[half:], strict=True))
    elif isinstance(value, set):
        value.update(contents)
    else:
        value.extend(contents)
