"""Compute step times with the closed forms of the papers, for equal stages and messages that take no time.

A closed form returns None for cases that it does not cover. In all other cases, it equals the makespan of `simulate`.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """The input of a closed form: p `ranks`, m microbatches (`micro`), and v stages per rank (`virtual`).

    `forward`, `backward_input` and `backward_weight` are the seconds F, I and W of one stage.
    """

    ranks: int
    micro: int
    virtual: int = 1
    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    @property
    def microbatch_seconds(self) -> float:
        """Return the compute seconds of one microbatch in one stage."""
        return self.forward + self.backward_input + self.backward_weight


MakespanForm = Callable[[PipelineCase], float | None]


def naive_makespan(case: PipelineCase) -> float | None:
    """Return the makespan if only one rank computes at any time: bubble 1 - 1/p."""
    return case.micro * case.virtual * case.ranks * case.microbatch_seconds


def one_f_one_b_makespan(case: PipelineCase) -> float | None:
    """Return the makespan of GPipe, 1F1B, breadth-first and interleaved: bubble (p - 1) / (m v + p - 1) for m >= p.

    With m < p, a rank waits before each of its later stages until the first microbatch arrives there.
    """
    rounds = max(case.micro, case.ranks) * (case.virtual - 1) + case.micro + case.ranks - 1
    return rounds * case.microbatch_seconds


def zero_bubble_makespan(case: PipelineCase) -> float | None:
    """Return the makespan of ZB-H1, in which a rank is idle for (p - 1) (F + I - W).

    It is known for m >= p, W <= F and W <= I. Return None otherwise.
    """
    if case.micro < case.ranks or case.backward_weight > min(case.forward, case.backward_input):
        return None
    idle = (case.ranks - 1) * (case.forward + case.backward_input - case.backward_weight)
    return case.micro * case.virtual * case.microbatch_seconds + idle


def zbv_makespan(case: PipelineCase) -> float | None:
    """Return the makespan of ZB-V, in which a rank is idle for (p - 1) F.

    It is known for F = I = W and m >= 2 (p - 1). Return None otherwise.
    """
    if case.micro < 2 * (case.ranks - 1) or not case.forward == case.backward_input == case.backward_weight:
        return None
    return case.micro * case.virtual * case.microbatch_seconds + (case.ranks - 1) * case.forward


def bubble_fraction(form: MakespanForm, case: PipelineCase) -> float | None:
    """Return the bubble fraction according to a closed form; None if the form does not cover the case."""
    makespan = form(case)
    return None if makespan is None else 1 - case.micro * case.virtual * case.microbatch_seconds / makespan
