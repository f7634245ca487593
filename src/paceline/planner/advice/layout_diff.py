"""Describe how two estimates differ: in options, step time and peak memory."""

from dataclasses import fields

from paceline.console.formatting import format_precise_duration, format_size
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate

_OPTION_NAMES = tuple(field.name for field in fields(Candidate))
_MIN_RELATIVE_DIFFERENCE = 0.005  # of the whole step or peak; smaller differences of their parts are not shown


def layout_differences(before: Estimate, after: Estimate) -> tuple[str, ...]:
    """Return four lines: the two layouts, the changed options, the step time and the peak memory.

    The lines on time and memory also have the parts that differ, the largest difference first.
    """
    changed = [
        f"{name} {_option_text(before, name)} -> {_option_text(after, name)}"
        for name in _OPTION_NAMES
        if _differs(before, after, name)
    ]
    seconds = _largest_differences(
        before.seconds.parts, after.seconds.parts, minimum=_MIN_RELATIVE_DIFFERENCE * before.step_seconds
    )
    memory = _largest_differences(
        before.memory.parts, after.memory.parts, minimum=_MIN_RELATIVE_DIFFERENCE * before.peak_bytes
    )
    change = after.step_seconds / before.step_seconds - 1
    return (
        f"{before.candidate} -> {after.candidate}",
        f"changed: {', '.join(changed) or 'nothing'}",
        f"step: {format_precise_duration(before.step_seconds)} -> "
        f"{format_precise_duration(after.step_seconds)} ({change:+.1%})"
        + "".join(
            f"; {name} {'+' if difference > 0 else '-'}{format_precise_duration(abs(difference))}"
            for name, difference in seconds
        ),
        f"peak: {format_size(int(before.peak_bytes))} -> {format_size(int(after.peak_bytes))}"
        + "".join(
            f"; {name} {'+' if difference > 0 else '-'}{format_size(int(abs(difference)))}"
            for name, difference in memory
        ),
    )


def _option_text(estimate: Estimate, name: str) -> str:
    value = getattr(estimate.candidate, name)
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def _differs(before: Estimate, after: Estimate, name: str) -> bool:
    return bool(getattr(before.candidate, name) != getattr(after.candidate, name))


def _largest_differences(
    before: dict[str, float], after: dict[str, float], *, minimum: float
) -> list[tuple[str, float]]:
    """Return the (name, difference) of each part that changes by more than `minimum`, the largest first."""
    differences = [(name, after[name] - before[name]) for name in before]
    return sorted((pair for pair in differences if abs(pair[1]) > minimum), key=lambda pair: -abs(pair[1]))
