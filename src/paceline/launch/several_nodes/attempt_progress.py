"""The progress of the ranks of an attempt, from their heartbeats, and the result of the attempt on a node."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.launch.agent.shared_status import read_heartbeat
from paceline.launch.failures.failure_record import Failure


class AttemptProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of some ranks of an attempt."""

    start_step: int = -1
    """The step from which the attempt started; -1 if no rank restored its state."""
    step: int = 0
    """The last step that a rank finished."""
    max_restarts: int = -1
    """The setting `survive.restarts`, which the job may have set; -1 if no rank got that far."""

    def last_step(self, *, before: int = 0) -> int:
        """Return the last step of the run: that `before` this attempt if no rank has restored its state yet."""
        return max(self.step, self.start_step) if self.step or self.start_step >= 0 else before


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """The result of the part of an attempt that ran on one node, or of the whole attempt."""

    exit_code: int
    failure: Failure | None
    progress: AttemptProgress


def read_progress(folder: Path, ranks: Iterable[int]) -> AttemptProgress:
    """Return the progress of these ranks, which run on this machine, from their pages in the attempt folder."""
    pages = (read_heartbeat(folder / f"pulse-{rank}") for rank in ranks)
    return join_progress(
        AttemptProgress(start_step=beat.start_step, step=beat.step, max_restarts=beat.max_restarts)
        for beat in pages
        if beat is not None
    )


def join_progress(parts: Iterable[AttemptProgress]) -> AttemptProgress:
    """Return the progress of several groups of ranks together."""
    parts = list(parts)
    return AttemptProgress(
        start_step=max((part.start_step for part in parts), default=-1),
        step=max((part.step for part in parts), default=0),
        max_restarts=max((part.max_restarts for part in parts), default=-1),
    )
