"""The agent's watch for ranks that are alive and send no heartbeat, while no rank times out waiting for another."""

import time
from collections.abc import Mapping
from pathlib import Path

from paceline.launch.agent.shared_status import read_pulse
from paceline.launch.failures.failure_record import Failure
from paceline.launch.failures.hang_detection import SilentRank, all_silent, find_silent, silence_notice

_LOOK_SECONDS = 1.0
_LEAST_SECONDS = 2.0
_SHARE = 1.1  # ranks that wait for each other time out first, with a better message
_OVER, _BUSY = "over", ("on_eval", "save")
DEFAULT_SECONDS = 600.0


class Watcher:
    """A watch that adds up, for each rank, the time between the agent's checks in which its heartbeat did not change.

    A clock would also count time in which the whole machine, and the agent with it, was stopped.
    """

    def __init__(self, folder: Path, *, status_fd: int, seconds: float = DEFAULT_SECONDS) -> None:
        self._folder = folder
        self._status_fd = status_fd
        self._seconds = seconds
        self._quiet: dict[int, float] = {}
        self._beats: dict[int, int] = {}
        self._looked = time.monotonic()
        self._told_after = 0.0
        self._last: dict[int, SilentRank] = {}

    def look(self, pids: Mapping[int, int]) -> tuple[str, Failure | None]:
        """Return a message to print, and the failure of a run in which every rank hangs in its own code.

        A single silent rank may just be slow, so the run continues. If all ranks have the same stacks at two checks,
        they are not slow: if one of them were waiting for another, it would have timed out.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return "", None
        passed, self._looked = min(now - self._looked, 2 * _LOOK_SECONDS), now
        patience, phases = self._count(pids, passed)
        late = {rank: pid for rank, pid in pids.items() if self._quiet[rank] > patience and phases[rank] != _OVER}
        if not late:
            self._told_after, self._last = 0.0, {}
            return "", None
        seconds = min(self._quiet[rank] for rank in late)
        if seconds < self._told_after:
            return "", None
        self._told_after = 2 * seconds if self._told_after else patience + seconds
        silent = find_silent(self._folder, late, status_fd=self._status_fd)
        is_same = self._is_where_it_was(silent)
        self._last = {one.rank: one for one in silent}
        all_late = len(late) == len(pids) > 1 and len(silent) == len(pids)
        if all_late and is_same and not any(phase in _BUSY for phase in phases.values()):
            return "", all_silent(silent, seconds=seconds)
        return silence_notice(silent, seconds=seconds), None

    def _count(self, pids: Mapping[int, int], passed: float) -> tuple[float, dict[int, str]]:
        patience, phases = self._seconds, {}
        for rank in pids:
            beat = read_pulse(self._folder / f"pulse-{rank}")
            moment = beat.monotonic_ns if beat is not None else 0
            is_new = self._beats.get(rank) != moment
            self._beats[rank] = moment
            self._quiet[rank] = 0.0 if is_new else self._quiet.get(rank, 0.0) + passed
            phases[rank] = beat.phase if beat is not None else ""
            if beat is not None and beat.patience:
                patience = beat.patience
        return max(patience * _SHARE, patience + _LEAST_SECONDS), phases

    def _is_where_it_was(self, silent: list[SilentRank]) -> bool:
        """Return whether each rank has the same stack as at the last check; a stopped rank has no stack."""
        before = self._last
        return all(one.stack.frames and one.rank in before and before[one.rank].stack == one.stack for one in silent)
