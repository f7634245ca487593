"""Comparison of two forecasts: the differences between the layouts, and where they come from."""

from dataclasses import fields

from paceline.console.formatting import format_precise_duration, format_size
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate

_NAMES = tuple(field.name for field in fields(Candidate))
_SMALL = 0.005


def layout_differences(one: Estimate, other: Estimate) -> tuple[str, ...]:
    """Return the changed options, step time and peak memory; parts with the largest difference first."""
    changed = [f"{name} {_said(one, name)} -> {_said(other, name)}" for name in _NAMES if _differs(one, other, name)]
    seconds = _most(one.seconds.parts, other.seconds.parts, least=_SMALL * one.step_seconds)
    memory = _most(one.memory.parts, other.memory.parts, least=_SMALL * one.peak_bytes)
    change = other.step_seconds / one.step_seconds - 1
    return (
        f"{one.candidate} -> {other.candidate}",
        f"changed: {', '.join(changed) or 'nothing'}",
        f"step: {format_precise_duration(one.step_seconds)} -> "
        f"{format_precise_duration(other.step_seconds)} ({change:+.1%})"
        + "".join(f"; {name} {'+' if by > 0 else '-'}{format_precise_duration(abs(by))}" for name, by in seconds),
        f"peak: {format_size(int(one.peak_bytes))} -> {format_size(int(other.peak_bytes))}"
        + "".join(f"; {name} {'+' if by > 0 else '-'}{format_size(int(abs(by)))}" for name, by in memory),
    )


def _said(estimate: Estimate, name: str) -> str:
    value = getattr(estimate.candidate, name)
    return "+".join(value) or "none" if isinstance(value, tuple) else str(value)


def _differs(one: Estimate, other: Estimate, name: str) -> bool:
    return bool(getattr(one.candidate, name) != getattr(other.candidate, name))


def _most(one: dict[str, float], other: dict[str, float], *, least: float) -> list[tuple[str, float]]:
    found = [(name, other[name] - one[name]) for name in one]
    return sorted((pair for pair in found if abs(pair[1]) > least), key=lambda pair: -abs(pair[1]))
