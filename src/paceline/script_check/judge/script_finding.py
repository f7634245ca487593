"""A finding about a training script: what is wrong, since which step, where, and what to do."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScriptFinding:
    """A finding. `name` is its kind, such as "not-reduced". A note is no fault, and does not change the exit code."""

    name: str
    text: str
    step: int = 0
    parameter: str = ""
    line: str = ""
    """The user's line, as `file:number`; "" if it is unknown."""
    hint: str = ""
    is_note: bool = False
