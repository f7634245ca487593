"""Counts in a layout, with upper bounds, so that a typing error does not start processes or a search of that size."""

from paceline.errors import LayoutError, PacelineError

REST = -1
MOST_RANKS = 100_000
_MOST_STAGES = 1_000  # of one rank


def read_size(part: str, value: str, problems: list[PacelineError]) -> int:
    """Return the count of an axis, or `REMAINING_RANKS`; an invalid count is added to `problems`."""
    if value == str(REST):
        return REST
    axis = part.partition("=")[0].strip()
    example = "dp=2,ep=2" if axis == "ep" else f"{axis}=2"
    if not value.isdecimal() or not value.strip("0"):
        problems.append(
            LayoutError(f"{part.strip()!r}: an axis needs a count, got {value!r}.", hint=f"--layout {example}")
        )
        return 1
    if _is_beyond(value, MOST_RANKS):
        problems.append(_too_many(axis, value, MOST_RANKS, hint=f"--layout {example}"))
        return 1
    return int(value)


def read_virtual(value: str | None, problems: list[PacelineError]) -> int | None:
    """Return the number of stages per rank, or None if not given; an invalid count is added to `problems`."""
    if value is None:
        return None
    if value.isdecimal() and value.strip("0"):
        if not _is_beyond(value, _MOST_STAGES):
            return int(value)
        problems.append(_too_many("virtual", value, _MOST_STAGES, hint="virtual=2"))
        return None
    problems.append(LayoutError(f"virtual={value} is not a number of stages per rank.", hint="virtual=2"))
    return None


def is_count(value: str) -> bool:
    """Return whether the text is a count that an axis can have."""
    return value.isdecimal() and bool(value.strip("0")) and not _is_beyond(value, MOST_RANKS)


def _is_beyond(digits: str, most: int) -> bool:
    """Return whether the number exceeds `limit`, without converting arbitrarily many digits."""
    return len(digits.lstrip("0")) > len(str(most)) or int(digits) > most


def _too_many(name: str, digits: str, most: int, *, hint: str) -> LayoutError:
    said = digits if len(digits) <= 30 else f"{digits[:27]}..."
    return LayoutError(f"{name}={said} is too many: {most:,} at most.", cause="one digit too many", hint=hint)
