"""The supervisor's watch for ranks that are alive but send no heartbeat."""

import time
from collections.abc import Mapping
from pathlib import Path

from paceline.launch.agent.shared_status import BUSY_PHASES, FINISHED_PHASE, read_heartbeat
from paceline.launch.failures.failure_record import Failure
from paceline.launch.failures.stuck_rank import SilentRank, all_silent_failure, find_silent_ranks, silence_notice

_CHECK_SECONDS = 1.0
_MIN_MARGIN_SECONDS = 2.0
_TIMEOUT_FACTOR = 1.1  # ranks that wait for each other time out first, with a better message
DEFAULT_SECONDS = 600.0


class SilenceWatcher:
    """A watch on how long each rank has been silent.

    The silence of a rank is the sum of the times between the checks at which its heartbeat was unchanged. The time
    since the last heartbeat would also include time in which the whole machine was suspended.
    """

    def __init__(self, folder: Path, *, status_fd: int, seconds: float = DEFAULT_SECONDS) -> None:
        self._folder = folder
        self._status_fd = status_fd
        self._seconds = seconds
        self._silent_seconds: dict[int, float] = {}
        self._beat_times: dict[int, int] = {}
        self._check_time = time.monotonic()
        self._next_notice_seconds = 0.0
        self._previous_silent: dict[int, SilentRank] = {}

    def check(self, pids: Mapping[int, int]) -> tuple[str, Failure | None]:
        """Return a message to print, and a failure if every rank hangs and no rank waits for another.

        A single silent rank may just be slow, so the run continues. If the stack of every rank is the same at
        two notices, the ranks hang, because a rank that only waited for another would have timed out.
        """
        now = time.monotonic()
        if now - self._check_time < _CHECK_SECONDS:
            return "", None
        elapsed, self._check_time = min(now - self._check_time, 2 * _CHECK_SECONDS), now
        timeout, phases = self._update_silence(pids, elapsed)
        late_pids = {
            rank: pid
            for rank, pid in pids.items()
            if self._silent_seconds[rank] > timeout and phases[rank] != FINISHED_PHASE
        }
        if not late_pids:
            self._next_notice_seconds, self._previous_silent = 0.0, {}
            return "", None
        seconds = min(self._silent_seconds[rank] for rank in late_pids)
        if seconds < self._next_notice_seconds:
            return "", None
        self._next_notice_seconds = 2 * seconds if self._next_notice_seconds else timeout + seconds
        silent = find_silent_ranks(self._folder, late_pids, status_fd=self._status_fd)
        is_unchanged = self._is_unchanged(silent)
        self._previous_silent = {silent_rank.rank: silent_rank for silent_rank in silent}
        are_all_late = len(late_pids) == len(pids) > 1 and len(silent) == len(pids)
        if are_all_late and is_unchanged and not any(phase in BUSY_PHASES for phase in phases.values()):
            return "", all_silent_failure(silent, seconds=seconds)
        return silence_notice(silent, seconds=seconds), None

    def _update_silence(self, pids: Mapping[int, int], elapsed: float) -> tuple[float, dict[int, str]]:
        """Update the silent time of each rank; return the timeout with its margin, and the phase of each rank."""
        timeout, phases = self._seconds, {}
        for rank in pids:
            beat = read_heartbeat(self._folder / f"pulse-{rank}")
            beat_time = beat.monotonic_ns if beat is not None else 0
            is_new = self._beat_times.get(rank) != beat_time
            self._beat_times[rank] = beat_time
            self._silent_seconds[rank] = 0.0 if is_new else self._silent_seconds.get(rank, 0.0) + elapsed
            phases[rank] = beat.phase if beat is not None else ""
            if beat is not None and beat.silence_timeout:
                timeout = beat.silence_timeout
        return max(timeout * _TIMEOUT_FACTOR, timeout + _MIN_MARGIN_SECONDS), phases

    def _is_unchanged(self, silent: list[SilentRank]) -> bool:
        """Return whether each rank has the same stack as at the last notice; a stopped rank has no stack."""
        previous = self._previous_silent
        return all(
            silent_rank.stack.frames
            and silent_rank.rank in previous
            and previous[silent_rank.rank].stack == silent_rank.stack
            for silent_rank in silent
        )
