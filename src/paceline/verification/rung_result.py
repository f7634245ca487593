"""The result of a rung: a verdict, the worst distance, and the first difference with its likely cause."""

from dataclasses import dataclass, field
from typing import Any

BITWISE, ROUNDING, DIFFERENT = "bitwise", "rounding", "different"
VERDICTS = (BITWISE, ROUNDING, DIFFERENT)
UNDECIDED = "undecided"  # the verdict of an answer if no rung compared anything with one process
RECORDING_FLOOR = 1e-4  # the relative distance up to which tensors of two recorded runs differ by rounding only


@dataclass(kw_only=True)
class RungResult:
    """The result of one rung. Its fields are plain JSON, so that rank 0 can share it with the other ranks."""

    verdict: str = BITWISE
    max_difference: float = 0.0
    """The difference of the tensor with the largest ratio of difference to noise floor."""
    noise_floor: float = 0.0
    """The noise floor of that tensor."""
    first_difference: dict[str, Any] | None = None
    detail: str = ""
    warning: str = ""
    left_out: str = ""
    """What the verdict does not cover, although the user would expect it."""
    depends_on_microbatches: bool = False
    """Whether another split of the batches into microbatches may give other results."""
    draws_random_numbers: bool | None = None
    """Whether forward or loss draw random numbers; None if this rung did not test it."""
    has_dropout_off: bool = False
    """True if this rung disables dropout, because one process cannot draw the same random numbers."""
    compared: dict[str, int] = field(default_factory=dict)
    """The number of compared tensors or metrics, by kind."""
    coverage: dict[str, Any] = field(default_factory=dict)
    """The fields of a `StepCoverage`; empty if no step was recorded."""

    def record(self, verdict: str, *, difference: float = 0.0, floor: float = 0.0) -> None:
        """Record the verdict on one tensor. Only the worst verdict and the largest ratio to the floor are stored."""
        self.verdict = max(self.verdict, verdict, key=VERDICTS.index)
        if _floor_ratio(difference, floor) > _floor_ratio(self.max_difference, self.noise_floor):
            self.max_difference, self.noise_floor = difference, floor

    def record_difference(self, *, step: int, parameter: str, cause: str) -> None:
        """Record a difference; only the first one is stored."""
        self.verdict = DIFFERENT
        if self.first_difference is None:
            self.first_difference = {"step": step, "parameter": parameter, "cause": cause}

    def record_uncovered(self, description: str) -> None:
        """Record something that the verdict does not cover."""
        if description and description not in self.left_out:
            self.left_out = f"{self.left_out}; {description}" if self.left_out else description

    def count_compared(self, kind: str, number: int) -> None:
        """Add to the number of tensors or metrics of this kind that were compared."""
        self.compared[kind] = self.compared.get(kind, 0) + number


def judge_distance(distance: float, floor: float) -> str:
    """Return the verdict on one distance; NaN gives `different`."""
    if distance == 0.0:
        return BITWISE
    return ROUNDING if distance <= floor else DIFFERENT


def _floor_ratio(difference: float, floor: float) -> float:
    if difference != difference:
        return float("inf")
    return difference / floor if floor > 0.0 else (float("inf") if difference > 0.0 else 0.0)
