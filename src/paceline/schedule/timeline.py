"""Describe when each rank ran its actions, in the same form for simulated and measured runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.schedule.program import Action, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The start and stop of one action of a rank, in seconds; a receive lasts while the rank waits for it."""

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
    def compute_spans(self) -> tuple[Span, ...]:
        """Return the spans without the messages."""
        return tuple(span for span in self.spans if span.action.op.is_compute)

    @property
    def start(self) -> float:
        """Return the time at which the first rank began to compute."""
        return min((span.start for span in self.compute_spans), default=0.0)

    @property
    def makespan(self) -> float:
        """Return the seconds from the first compute's start to the last one's end."""
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
        """Return the fraction of the makespan in which each rank did not compute, 0 to 1."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """Return the bubble fraction: the mean of `bubbles`."""
        return sum(self.bubbles) / self.num_ranks

    def peak_activations(self, *, stage_sizes: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return each rank's peak of stage activations, which it holds from the start of F to the end of B or W.

        `stage_sizes[stage]` are the bytes of one activation; the default is 1. A program without backward holds none.
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
    """Return the highest running sum of (time, change) pairs; at equal times, ends are counted before starts."""
    level = highest = 0.0
    for _, change in sorted(changes):
        level += change
        highest = max(highest, level)
    return highest
