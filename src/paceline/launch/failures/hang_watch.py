"""The supervisor's watch for hangs: within seconds, it names the rank for which the others wait. The run continues.

A rank that is named may just be slow, so this watch ends nothing. The ranks end when one of them has waited for
`train.timeout_seconds`.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch.failures.hang_diagnosis import Hang, find_hang
from paceline.launch.failures.rank_observer import RankObserver
from paceline.launch.failures.rank_position import RankPosition
from paceline.launch.failures.stuck_rank import describe_data_worker

HANGS = "hangs.jsonl"
# The same ranks are reported again after a minute. Before, their hang must have lasted for 30 s, and for ten times as
# long as when it was reported.
_REPEAT_SECONDS, _REPEAT_FACTOR, _SOON_SECONDS = 60.0, 10.0, 30.0


class HangWatch:
    """The watch over the ranks of one attempt.

    With `remote`, some ranks run on other machines. It returns the positions of those, or None if some are unknown now.
    """

    def __init__(
        self,
        folder: Path,
        *,
        status_fd: int | None = None,
        remote: Callable[[], Sequence[RankPosition] | None] = tuple,
    ) -> None:
        self._folder = folder
        self._status_fd = status_fd  # of the buffer into which data workers write their stacks
        self._remote = remote
        self._observer = RankObserver(folder)
        self._reported: Hang | None = None
        self._last_reports: dict[tuple[int, ...], tuple[float, float]] = {}  # time and seconds of a hang, by its ranks

    def check(self, pids: Mapping[int, int]) -> str:
        """Return a message to print, or an empty text. `pids` are the processes of the ranks."""
        if not self._observer.update(pids):
            return ""
        if self._reported is not None:
            message = self._recovery_message(pids)
            if message:
                return message
        if not self._observer.has_silent_ranks(pids):
            return ""
        local, remote = self._observer.positions(pids), self._remote()
        if remote is None:
            return ""
        hang = find_hang([*local, *remote], step_seconds=self._observer.median_step_seconds)
        return "" if hang is None else self._report(hang)

    def _report(self, hang: Hang) -> str:
        """Return the message on a hang, and record it for `paceline why`. The same ranks are not reported often."""
        ranks, now = tuple(position.rank for position in hang.ranks), time.monotonic()
        last_time, last_seconds = self._last_reports.get(ranks, (-math.inf, 0.0))
        if now - last_time < _REPEAT_SECONDS and hang.seconds < max(_REPEAT_FACTOR * last_seconds, _SOON_SECONDS):
            return ""
        self._reported, self._last_reports[ranks] = hang, (now, hang.seconds)
        if hang.kind == "data" and self._status_fd is not None and not hang.ranks[0].host:
            hang = replace(hang, details=describe_data_worker(hang.ranks[0].pid, self._status_fd))
        with suppress(OSError), (self._folder / HANGS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **hang.as_json()}) + "\n")
        return hang.message

    def _recovery_message(self, pids: Mapping[int, int]) -> str:
        """Return a message if the ranks that held up the others have advanced.

        A rank of another machine has advanced if all ranks here have, because they waited for it.
        """
        assert self._reported is not None
        named = [position for position in self._reported.ranks if position.rank in pids or position.host]
        here = list(pids) if any(position.host for position in named) else [position.rank for position in named]
        if not named or any(self._observer.silent_seconds(rank) >= self._reported.seconds for rank in here):
            return ""
        self._reported = None
        ranks = [position.rank for position in named]
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
