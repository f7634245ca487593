"""Dynamic imports: `resolve("my.pkg:Thing")` returns the object. No other module imports dynamically."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import UsageError


def _current_folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  the result is a string, not a Path
    except OSError:  # it was deleted
        return ""


START_FOLDER = _current_folder()
"""The working folder when paceline was first imported. A script that changes its folder is restarted from here."""


def resolve(reference: str) -> Any:
    """Return the object that `"module:name"` names.

    Raises:
        UsageError: there is no such module or name.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise UsageError(f"{reference!r} does not name an object as module:name.", hint="my.package:Thing")
    try:
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except ModuleNotFoundError as error:
        raise UsageError(f"{reference!r}: no module named {error.name!r}.", hint="pip install it") from error
    except AttributeError as error:
        raise UsageError(f"{reference!r}: {module_name} has no {name}.") from error
    return target


def lazy_attributes(module_names: Mapping[str, str], *, package: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` (PEP 562) that imports the module of each name on first use."""

    def import_attribute(name: str) -> Any:
        if name not in module_names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_names[name]), name)

    return import_attribute
