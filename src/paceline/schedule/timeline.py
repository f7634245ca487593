"""Timelines of simulated and measured programs: when each rank ran its actions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.schedule.program import Action, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The start and stop of one action of a rank, in seconds. A receive lasts while the rank waits for the message."""

    rank: int
    action: Action
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Return the duration of the action."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The spans of all ranks on one clock."""

    name: str
    num_ranks: int
    spans: tuple[Span, ...]

    @cached_property
    def compute_spans(self) -> tuple[Span, ...]:
        """Return the spans without the messages."""
        return tuple(span for span in self.spans if span.action.op.is_compute)

    @property
    def start(self) -> float:
        """Return the time at which the first rank began to compute."""
        return min((span.start for span in self.compute_spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Return the seconds from the start of the first compute to the end of the last compute."""
        return max((span.stop for span in self.compute_spans), default=0.0) - self.start

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Return the seconds that each rank spent computing."""
        busy = [0.0] * self.num_ranks
        for span in self.compute_spans:
            busy[span.rank] += span.seconds
        return tuple(busy)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Return, for each rank, the fraction of the makespan (0 to 1) in which it did not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """Return the bubble fraction: the mean of `bubbles`."""
        return sum(self.bubbles) / self.num_ranks

    def peak_activations(self, *, stage_sizes: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return each rank's peak of stage activations. An activation exists from the start of F to the end of B or W.

        `stage_sizes[stage]` is the size of one activation, by default 1. The peak is 0 for a program without backward.
        """
        changes: list[list[tuple[float, float]]] = [[] for _ in range(self.num_ranks)]
        if any(span.action.op is not Op.FORWARD for span in self.compute_spans):
            for span in self.compute_spans:
                size = 1 if stage_sizes is None else stage_sizes[span.action.stage]
                if span.action.op is Op.FORWARD:
                    changes[span.rank].append((span.start, size))
                elif span.action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                    changes[span.rank].append((span.stop, -size))
        return tuple(_highest_sum(rank_changes) for rank_changes in changes)


def _highest_sum(changes: list[tuple[float, float]]) -> float:
    """Return the highest running sum of (time, change) pairs. At equal times, negative changes come first."""
    level = highest = 0.0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest
