"""Convert a plan file's JSON to the types that it was written from."""

from typing import Any, TypeVar

import msgspec

from paceline.errors import UsageError

_Kind = TypeVar("_Kind")


def convert_json(tree: Any, kind: type[_Kind], *, part: str) -> _Kind:
    """Convert JSON to the type `kind`, such as a dataclass. `part` names this part of the plan in an error message.

    Raises:
        UsageError: a value is missing or has another type.
    """
    try:
        return msgspec.convert(tree, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"this plan can't be read, in its {part}: {error}.",
            cause="another version wrote it, or it was edited by hand",
            hint="paceline plan job.py --run-dir FOLDER writes it again",
        ) from None
