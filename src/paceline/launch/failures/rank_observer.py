"""The observation of the ranks of one machine: how long each of them is silent, and stuck in one activity."""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.launch.agent.shared_status import Heartbeat, read_heartbeat
from paceline.launch.failures.rank_position import RankPosition, observe_rank
from paceline.launch.failures.stack_dumps import process_state

_CHECK_SECONDS = 0.25
_MAX_ELAPSED_SECONDS = 2 * _CHECK_SECONDS  # more means that the machine was suspended
_QUIET_SECONDS = 1.0  # the pages are read only if a rank is silent for longer
_NUM_STEPS = 50  # over which the median time of a step is measured
_UNCOUNTED_ACTIVITIES = ("compiling", "debugger")
_OWN_WORK = ("disk", "native", "lock", "code")  # a loop may change between these
_CHANGING_FACTOR = 5.0  # a rank whose activity changes may be silent for longer by this factor


class RankObserver:
    """The observer of the ranks of one attempt that run on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._beats: dict[int, Heartbeat | None] = {}
        self._silent_seconds: dict[int, float] = {}
        self._activities: dict[int, tuple[str, float]] = {}  # of silent ranks: the activity, and the seconds in it
        self._step_seconds = deque[float](maxlen=_NUM_STEPS)
        self._check_time = time.monotonic()
        self._elapsed = 0.0
        self._stopped: set[int] = set()
        self._has_stopped_ranks = False  # for at least two looks

    def update(self, pids: Mapping[int, int]) -> bool:
        """Look at the heartbeats of the ranks, whose processes are `pids`. Return False if the last look is too new."""
        now = time.monotonic()
        if now - self._check_time < _CHECK_SECONDS:
            return False
        self._elapsed, self._check_time = min(now - self._check_time, _MAX_ELAPSED_SECONDS), now
        for rank in pids:
            self._update_rank(rank, self._elapsed)
        stopped = {rank for rank, pid in pids.items() if process_state(pid) == "T"}
        for rank in self._stopped - stopped:
            self._silent_seconds[rank] = 0.0  # it continues now, and has not been slow
        self._has_stopped_ranks, self._stopped = bool(self._stopped & stopped), stopped
        return True

    def has_silent_ranks(self, pids: Mapping[int, int]) -> bool:
        """Return whether a rank is silent for so long that it is worth a look at what all of them do."""
        longest = max((self._silent_seconds[rank] for rank in pids), default=0.0)
        return self._has_stopped_ranks or longest >= _QUIET_SECONDS

    def silent_seconds(self, rank: int) -> float:
        """Return for how long a rank has sent no heartbeat."""
        return self._silent_seconds.get(rank, 0.0)

    @property
    def median_step_seconds(self) -> float | None:
        """The median time of a step; None before the second step."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def positions(self, pids: Mapping[int, int]) -> list[RankPosition]:
        """Return the positions of the ranks now. Their `silent_seconds` are how long they may have been stuck."""
        positions = [observe_rank(self._folder, rank, pid=pid) for rank, pid in sorted(pids.items())]
        return [replace(p, silent_seconds=self._stuck_seconds(p, self._elapsed)) for p in positions]

    def _update_rank(self, rank: int, elapsed: float) -> None:
        """Update how long a rank is silent, and the times of steps."""
        beat, previous = read_heartbeat(self._folder / f"pulse-{rank}"), self._beats.get(rank)
        is_new = beat is not None and (previous is None or beat.monotonic_ns != previous.monotonic_ns)
        self._silent_seconds[rank] = 0.0 if is_new else self._silent_seconds.get(rank, 0.0) + elapsed
        if is_new:
            self._activities.pop(rank, None)
        self._beats[rank] = beat
        if beat is None or previous is None or not previous.is_sent or beat.step <= previous.step:
            return
        if rank != min(self._beats):  # all ranks take the same steps
            return
        seconds = (beat.monotonic_ns - previous.monotonic_ns) / 1e9
        self._step_seconds.append(seconds / (beat.step - previous.step))

    def _stuck_seconds(self, position: RankPosition, elapsed: float) -> float:
        """Return for how long a rank may have been stuck in its activity.

        A rank that has read a slow sample and now computes has not been stuck for the whole time of its silence. A rank
        whose page is not written any more has been in native code since then, whatever the page says.
        """
        rank = position.rank
        activity = "work" if position.activity in _OWN_WORK else position.activity
        if activity in _UNCOUNTED_ACTIVITIES:
            self._silent_seconds[rank] = max(_QUIET_SECONDS, self._silent_seconds[rank] - elapsed)
        previous, seconds = self._activities.get(rank, (activity, self._silent_seconds[rank] - elapsed))
        seconds = seconds + elapsed if activity == previous else 0.0
        self._activities[rank] = activity, seconds
        native_seconds = position.unwritten_seconds if position.holds_gil else 0.0
        return max(seconds, native_seconds, self._silent_seconds[rank] / _CHANGING_FACTOR)
