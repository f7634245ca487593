"""The supervisor's watch for hangs: within seconds, it names the rank for which the others wait. The run continues.

A rank that is named may just be slow, so this watch ends nothing. The ranks end when one of them has waited for
`train.timeout_seconds`.
"""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch.agent.shared_status import Heartbeat, read_heartbeat
from paceline.launch.failures.hang_diagnosis import Hang, find_hang
from paceline.launch.failures.rank_position import RankPosition, observe_rank
from paceline.launch.failures.stack_dumps import process_state
from paceline.launch.failures.stuck_rank import describe_data_worker

HANGS = "hangs.jsonl"
_CHECK_SECONDS = 0.25
_MAX_ELAPSED_SECONDS = 2 * _CHECK_SECONDS  # more means that the machine was suspended
_QUIET_SECONDS = 1.0  # the pages are read only if a rank is silent for longer
_NUM_STEPS = 50  # over which the median time of a step is measured
_UNCOUNTED_ACTIVITIES = ("compiling", "debugger")
_OWN_WORK = ("disk", "native", "lock", "code")  # a loop may change between these
# The same ranks are reported again after a minute. Before, their hang must have lasted for 30 s, and for ten times as
# long as when it was reported.
_REPEAT_SECONDS, _REPEAT_FACTOR, _SOON_SECONDS = 60.0, 10.0, 30.0
_CHANGING_FACTOR = 5.0  # a rank whose activity changes may be silent for longer by this factor


class HangWatch:
    """The watch over the ranks of one attempt."""

    def __init__(self, folder: Path, *, status_fd: int | None = None) -> None:
        self._folder = folder
        self._status_fd = status_fd  # of the buffer into which data workers write their stacks
        self._beats: dict[int, Heartbeat | None] = {}
        self._silent_seconds: dict[int, float] = {}
        self._activities: dict[int, tuple[str, float]] = {}  # of silent ranks: the activity, and the seconds in it
        self._step_seconds = deque[float](maxlen=_NUM_STEPS)
        self._check_time = time.monotonic()
        self._stopped: set[int] = set()
        self._reported: Hang | None = None
        self._last_reports: dict[tuple[int, ...], tuple[float, float]] = {}  # time and seconds of a hang, by its ranks

    def check(self, pids: Mapping[int, int]) -> str:
        """Return a message to print, or an empty text. `pids` are the processes of the ranks."""
        now = time.monotonic()
        if now - self._check_time < _CHECK_SECONDS:
            return ""
        elapsed, self._check_time = min(now - self._check_time, _MAX_ELAPSED_SECONDS), now
        for rank in pids:
            self._update_rank(rank, elapsed)
        stopped = {rank for rank, pid in pids.items() if process_state(pid) == "T"}
        for rank in self._stopped - stopped:
            self._silent_seconds[rank] = 0.0  # it continues now, and has not been slow
        were_stopped, self._stopped = self._stopped & stopped, stopped
        if self._reported is not None:
            message = self._recovery_message(pids)
            if message:
                return message
        if not were_stopped and max((self._silent_seconds[rank] for rank in pids), default=0.0) < _QUIET_SECONDS:
            return ""
        hang = self._find_hang(pids, elapsed)
        return "" if hang is None else self._report(hang)

    @property
    def median_step_seconds(self) -> float | None:
        """The median time of a step; None before the second step."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

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

    def _find_hang(self, pids: Mapping[int, int], elapsed: float) -> Hang | None:
        positions = [observe_rank(self._folder, rank, pid=pid) for rank, pid in sorted(pids.items())]
        positions = [replace(p, silent_seconds=self._stuck_seconds(p, elapsed)) for p in positions]
        return find_hang(positions, step_seconds=self.median_step_seconds)

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

    def _report(self, hang: Hang) -> str:
        """Return the message on a hang, and record it for `paceline why`. The same ranks are not reported often."""
        ranks, now = tuple(position.rank for position in hang.ranks), time.monotonic()
        last_time, last_seconds = self._last_reports.get(ranks, (-math.inf, 0.0))
        if now - last_time < _REPEAT_SECONDS and hang.seconds < max(_REPEAT_FACTOR * last_seconds, _SOON_SECONDS):
            return ""
        self._reported, self._last_reports[ranks] = hang, (now, hang.seconds)
        if hang.kind == "data" and self._status_fd is not None:
            hang = replace(hang, details=describe_data_worker(hang.ranks[0].pid, self._status_fd))
        with suppress(OSError), (self._folder / HANGS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **hang.as_json()}) + "\n")
        return hang.message

    def _recovery_message(self, pids: Mapping[int, int]) -> str:
        """Return a message if the ranks that held up the others have advanced."""
        assert self._reported is not None
        ranks = [position.rank for position in self._reported.ranks if position.rank in pids]
        if not ranks or any(self._silent_seconds[rank] >= self._reported.seconds for rank in ranks):
            return ""
        self._reported = None
        return (
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} continue{'s' * (len(ranks) == 1)}"
        )


def read_hangs(folder: Path) -> list[dict[str, Any]]:
    """Return the hangs that were recorded in an attempt folder; a line that was cut off is left out."""
    hangs = []
    with suppress(OSError):
        for line in (folder / HANGS).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                hangs.append(json.loads(line))
    return [hang for hang in hangs if isinstance(hang, dict) and isinstance(hang.get("ranks"), list)]
