"""Timelines of what each rank did when, in one form for simulated and measured runs, to compare and draw both alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.schedule.program import Action, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The start and stop of one action of a rank, in seconds; a receive lasts as long as the rank waited for it."""

    rank: int
    action: Action
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The spans of all ranks on one clock."""

    name: str
    num_ranks: int
    spans: tuple[Span, ...]

    @cached_property
    def computes(self) -> tuple[Span, ...]:
        """Return the spans without the messages."""
        return tuple(span for span in self.spans if span.action.op.is_compute)

    @property
    def start(self) -> float:
        """Return the time at which the first rank began to compute."""
        return min((span.start for span in self.computes), default=0.0)

    @property
    def makespan(self) -> float:
        """Return the seconds from the first compute's start to the last one's end."""
        return max((span.stop for span in self.computes), default=0.0) - self.start

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Return the seconds that each rank spent computing."""
        busy = [0.0] * self.num_ranks
        for span in self.computes:
            busy[span.rank] += span.seconds
        return tuple(busy)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Return the fraction of the makespan in which each rank did not compute, 0 to 1."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """Return the bubble fraction: the mean of `bubbles`."""
        return sum(self.bubbles) / self.num_ranks

    def peak_activations(self, *, of_stage: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return each rank's peak of stage activations, held from their forward's start until B or W is done.

        `of_stage` gives their sizes (bytes); by default each counts 1. A program without training holds none.
        """
        changes: list[list[tuple[float, float]]] = [[] for _ in range(self.num_ranks)]
        if any(span.action.op is not Op.FORWARD for span in self.computes):
            for span in self.computes:
                size = 1 if of_stage is None else of_stage[span.action.stage]
                if span.action.op is Op.FORWARD:
                    changes[span.rank].append((span.start, size))
                elif span.action.op in (Op.BACKWARD, Op.WEIGHT):
                    changes[span.rank].append((span.stop, -size))
        return tuple(_highest(found) for found in changes)


def _highest(changes: list[tuple[float, float]]) -> float:
    """Return the highest running sum; at equal times, ends are counted before starts."""
    level = highest = 0.0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest
