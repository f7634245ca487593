"""Closed forms of the papers for the time of a step, with equal stages and messages that take no time.

A form returns None where it does not hold; everywhere else `simulate` gives the same value.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """The input of a form: `ranks` p, `micro` m, `virtual` v stages per rank.

    The times are the seconds of F, I and W of one stage (B = I + W).
    """

    ranks: int
    micro: int
    virtual: int = 1
    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0

    @property
    def each(self) -> float:
        """Return the seconds that a microbatch computes in one stage."""
        return self.forward + self.input + self.weight


Form = Callable[[PipelineCase], float | None]


def naive(case: PipelineCase) -> float | None:
    """Return the makespan without overlap: bubble 1 - 1/p."""
    return case.micro * case.virtual * case.ranks * case.each


def one_after_another(case: PipelineCase) -> float | None:
    """Return the makespan of GPipe, 1F1B, breadth-first and interleaved: bubble (p - 1) / (m v + p - 1) for m >= p.

    With fewer microbatches than ranks, each further stage of a rank waits for the loop to come round.
    """
    rounds = max(case.micro, case.ranks) * (case.virtual - 1) + case.micro + case.ranks - 1
    return rounds * case.each


def weights_put_off(case: PipelineCase) -> float | None:
    """Return the makespan of ZB-H1: p - 1 times F + I - W is idle; holds for m >= p and W no longer than F or I."""
    if case.micro < case.ranks or case.weight > min(case.forward, case.input):
        return None
    idle = (case.ranks - 1) * (case.forward + case.input - case.weight)
    return case.micro * case.virtual * case.each + idle


def vee(case: PipelineCase) -> float | None:
    """Return the makespan of ZB-V: (p - 1) F is idle, the way to the last rank; holds for F = I = W, m >= 2 (p - 1)."""
    if case.micro < 2 * (case.ranks - 1) or not case.forward == case.input == case.weight:
        return None
    return case.micro * case.virtual * case.each + (case.ranks - 1) * case.forward


def bubble_of(form: Form, case: PipelineCase) -> float | None:
    """Return the bubble fraction of a form; None where it does not hold."""
    makespan = form(case)
    return None if makespan is None else 1 - case.micro * case.virtual * case.each / makespan
