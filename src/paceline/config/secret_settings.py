"""Recognize secret settings, which are hidden on screens and stored in files that only the owner can read."""

import re
from collections.abc import Iterable
from typing import Any

HIDDEN = "•••"
_SECRET = re.compile(
    r"(^|[._-])(password|passwd|secret|token|credential|api_?key|access_?key|private_?key)$", re.IGNORECASE
)
_MASK = re.compile(r"[*•●·]{2,}|[\[(<{]?(redacted|masked|hidden|secret)[\])>}]?", re.IGNORECASE)


def is_mask(name: str, value: Any) -> bool:
    """Return whether the value is a mask: `HIDDEN` or, for a secret, a placeholder that other tools print."""
    if not isinstance(value, str):
        return False
    return value == HIDDEN or bool(_SECRET.search(name) and _MASK.fullmatch(value))


def mask_value(name: str, value: Any) -> str:
    """Return the value as text, or dots if `name` is the name of a secret."""
    return HIDDEN if _SECRET.search(name) else str(value)


def holds_secret(names: Iterable[str]) -> bool:
    """Return whether one of the settings is a secret."""
    return any(_SECRET.search(name) for name in names)
