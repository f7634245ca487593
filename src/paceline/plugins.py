"""`"my.pkg:Thing"` to the object: the only dynamic import."""

import importlib
from typing import Any

from paceline.errors import UsageError


def resolve(reference: str) -> Any:
    """The object that `"module:name"` names.

    Raises:
        UsageError: there is no such module or name.
    """
    place, _, name = reference.partition(":")
    if not place or not name:
        raise UsageError(f"{reference!r} is no reference.", hint="my.package:Thing")
    try:
        found: Any = importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise UsageError(f"{reference!r}: no module named {error.name!r}.", hint="pip install it") from error
    except AttributeError as error:
        raise UsageError(f"{reference!r}: {place} has no {name}.") from error
    return found
