"""Read the counts in a layout. They have upper bounds, so that a typing error does not start millions of processes."""

from paceline.errors import LayoutError, PacelineError

REMAINING_RANKS = -1  # the size of an axis that gets all ranks which the other axes leave
MAX_RANKS = 100_000
_MAX_STAGES = 1_000  # of one rank


def read_size(item: str, value: str, problems: list[PacelineError]) -> int:
    """Return the count of an axis, or `REMAINING_RANKS`; an invalid count is added to `problems`.

    `item` is the axis with its count, such as `tp=2`, and `value` the count.
    """
    if value == str(REMAINING_RANKS):
        return REMAINING_RANKS
    axis = item.partition("=")[0].strip()
    example = "dp=2,ep=2" if axis == "ep" else f"{axis}=2"
    if not value.isdecimal() or not value.strip("0"):
        problems.append(
            LayoutError(f"{item.strip()!r}: an axis needs a count, got {value!r}.", hint=f"--layout {example}")
        )
        return 1
    if _exceeds(value, MAX_RANKS):
        problems.append(_too_many_error(axis, value, MAX_RANKS, hint=f"--layout {example}"))
        return 1
    return int(value)


def read_virtual(value: str | None, problems: list[PacelineError]) -> int | None:
    """Return the number of stages per rank, or None if not given; an invalid count is added to `problems`."""
    if value is None:
        return None
    if value.isdecimal() and value.strip("0"):
        if not _exceeds(value, _MAX_STAGES):
            return int(value)
        problems.append(_too_many_error("virtual", value, _MAX_STAGES, hint="virtual=2"))
        return None
    problems.append(LayoutError(f"virtual={value} is not a number of stages per rank.", hint="virtual=2"))
    return None


def is_count(value: str) -> bool:
    """Return whether the text is a count that an axis can have."""
    return value.isdecimal() and bool(value.strip("0")) and not _exceeds(value, MAX_RANKS)


def _exceeds(digits: str, limit: int) -> bool:
    """Return whether the number exceeds `limit`.

    If the number has more digits than `limit`, it is not converted to an int.
    """
    return len(digits.lstrip("0")) > len(str(limit)) or int(digits) > limit


def _too_many_error(name: str, digits: str, limit: int, *, hint: str) -> LayoutError:
    shown_digits = digits if len(digits) <= 30 else f"{digits[:27]}..."
    return LayoutError(f"{name}={shown_digits} is too many: {limit:,} at most.", cause="one digit too many", hint=hint)
