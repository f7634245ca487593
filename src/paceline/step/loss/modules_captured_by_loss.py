"""A search for the modules that a loss function captures. They are not part of the model, but every rank runs them."""

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_MAX_DEPTH = 4


def find_modules(function: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules that a function reaches by its closure, `self`, arguments or globals, with their names."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, module in _modules(function, "loss", 0, set()):
        for name, submodule in module.named_modules():
            found.setdefault(id(submodule), (f"{path}.{name}" if name else path, submodule))
    return list(found.values())


def find_parameters(function: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that a function reaches, directly or within modules, by name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, module in find_modules(function):
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), (f"{path}.{name}", parameter))
    for path, parameter in _walk(function, "loss", 0, set()):
        if isinstance(parameter, nn.Parameter):
            found.setdefault(id(parameter), (path, parameter))
    return dict(found.values())


def _modules(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, item) for name, item in _walk(value, path, depth, seen) if isinstance(item, nn.Module))


def _walk(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield each module and parameter that `value` reaches, with its path. `seen` has the ids of visited values."""
    if id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | nn.Parameter):
        yield path, value
        return
    for name, item in _captured_values(value):
        yield from _walk(item, name if depth == 0 else f"{path}.{name}", depth + 1, seen)


def _captured_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values that `value` refers to directly, each with a name."""
    if isinstance(value, partial):
        yield "func", value.func
        yield from ((f"args[{index}]", item) for index, item in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield "self", value.__self__
        yield from getattr(value.__self__, "__dict__", {}).items()
        yield "func", value.__func__
    elif isinstance(value, FunctionType):
        code = value.__code__
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not yet assigned
                continue
        yield from ((name, value.__globals__[name]) for name in code.co_names if name in value.__globals__)
        yield from _with_indices(value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple | set):
        yield from _with_indices(value)
    elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from vars(value).items()


def _with_indices(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield items with their indices as names."""
    return ((f"[{index}]", item) for index, item in enumerate(values))
