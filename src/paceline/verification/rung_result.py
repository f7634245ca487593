"""The result of a rung: a verdict, the worst distance, and the first difference with its likely cause."""

from dataclasses import dataclass, field
from typing import Any

BITWISE, ROUNDING, DIFFERENT = "bitwise", "rounding", "different"
VERDICTS = (BITWISE, ROUNDING, DIFFERENT)
UNDECIDED = "undecided"  # the verdict of a whole answer if no rung compared anything with one process
FLOOR = 1e-4  # relative distance between two recorded runs


@dataclass(kw_only=True)
class RungResult:
    """The result of one rung. Plain JSON, so that rank 0 can share it with the other ranks.

    `left_out`: what the verdict does not cover, although the user would expect it. `by_micro`: the job was not shown to
    give the same results with other microbatches.
    """

    verdict: str = BITWISE
    max_difference: float = 0.0
    noise_floor: float = 0.0
    first_difference: dict[str, Any] | None = None
    detail: str = ""
    warning: str = ""
    left_out: str = ""
    by_micro: bool = False
    compared: dict[str, int] = field(default_factory=dict)

    def note(self, verdict: str, *, difference: float = 0.0, floor: float = 0.0) -> None:
        """Record a verdict, and keep the distance that exceeds its own floor the most."""
        self.verdict = max(self.verdict, verdict, key=VERDICTS.index)
        if _excess(difference, floor) > _excess(self.max_difference, self.noise_floor):
            self.max_difference, self.noise_floor = difference, floor

    def blame(self, *, step: int, parameter: str, cause: str) -> None:
        """Record a difference; only the first one is kept."""
        self.verdict = DIFFERENT
        if self.first_difference is None:
            self.first_difference = {"step": step, "parameter": parameter, "cause": cause}

    def leave_out(self, what: str) -> None:
        """Record something that the verdict does not cover."""
        if what and what not in self.left_out:
            self.left_out = f"{self.left_out}; {what}" if self.left_out else what

    def count(self, kind: str, number: int) -> None:
        """Record how many things of a kind were compared."""
        self.compared[kind] = self.compared.get(kind, 0) + number


def verdict_of_distance(apart: float, floor: float) -> str:
    """Return the verdict on one distance; NaN is different from everything."""
    if apart == 0.0:
        return BITWISE
    return ROUNDING if apart <= floor else DIFFERENT


def _excess(difference: float, floor: float) -> float:
    if difference != difference:
        return float("inf")
    return difference / floor if floor > 0.0 else (float("inf") if difference > 0.0 else 0.0)
