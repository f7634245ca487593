"""Signs of life of a run whose processes can't be seen from here: the times of the files in its folder."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.filesystem.run_lock import LOCK, is_on_this_machine, is_run_folder_locked, lock_holder
from paceline.run_folder.run_folder import RunFolder

MAX_SILENT_SECONDS = 120.0
"""A disk that several machines share may show only after a minute that a rank has written its pages."""


def distant_host(run: RunFolder) -> str:
    """Return the machine that has locked the run folder, as far as is known here; empty if none or this one has."""
    holder = lock_holder(run.path)
    return "" if is_on_this_machine(holder) or not is_run_folder_locked(run.path) else str(holder.get("host"))


def silent_seconds(run: RunFolder) -> float:
    """Return for how long nothing has been written by a run: heartbeats, logs, events, metrics or checkpoints."""
    times = []
    for path in _written_files(run):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(0.0, time.time() - max(times, default=0.0))


def _written_files(run: RunFolder) -> Iterator[Path]:
    yield from (run.path / LOCK, run.events, run.path / "metrics.jsonl", run.checkpoints)
    yield from run.logs.glob("attempt-*/*")
