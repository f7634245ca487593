"""The sink that writes every event and every logged number to the run folder, one JSON object per line."""

import errno
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.console.formatting import plural
from paceline.events import EvalDone, Event, ForecastChecked, Note, StepDone, as_dict, forecast_ratios, step_metrics
from paceline.filesystem.atomic_files import open_no_follow, parse_json, read_regular
from paceline.run_folder.run_folder import RunFolder

_MAX_BYTES = 1 << 30
_MAX_UNWRITTEN_LINES = 20_000


class JsonlSink:
    """A sink that appends each event with one write, so that a kill can truncate a line but not merge two events.

    While the disk is full, it keeps at most 20,000 lines, and writes them once there is space again. A warning in the
    file then says how many lines are lost.
    """

    name = "events.jsonl and metrics.jsonl"

    def __init__(self, run: RunFolder) -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        self._events = _open(run.events)
        self._metrics = _open(run.metrics)
        self._unwritten = deque[tuple[int, bytes]]()
        self._num_lost = 0

    def handle(self, event: Event) -> None:
        """Append the event, after those that could not be written.

        Raises:
            OSError: the disk is full, or has another error.
        """
        record = as_dict(event)
        self._append(self._events, record)
        if isinstance(event, StepDone):
            self._append(self._metrics, {"step": event.step, "time": record["time"], **step_metrics(event)})
        if isinstance(event, ForecastChecked):
            self._append(self._metrics, {"step": event.step, "time": record["time"], **forecast_ratios(event)})
        if isinstance(event, EvalDone):
            metrics = {f"{event.split}/{name}": value for name, value in event.metrics.items()}
            self._append(self._metrics, {"step": event.step, "time": record["time"], **metrics})
        self._write_all()

    def _append(self, descriptor: int, record: Mapping[str, Any]) -> None:
        if len(self._unwritten) >= _MAX_UNWRITTEN_LINES:
            self._num_lost += 1
        else:
            self._unwritten.append((descriptor, (json.dumps(_json_value(record), default=str) + "\n").encode()))

    def _write_all(self) -> None:
        while self._unwritten:
            descriptor, line = self._unwritten[0]
            num_written = os.write(descriptor, line)
            if num_written != len(line):
                self._unwritten[0] = (descriptor, line[num_written:])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unwritten.popleft()
            if not self._unwritten and self._num_lost:
                text = f"{plural(self._num_lost, 'line')} of the run's records are lost: the disk was full for too long"
                self._num_lost = 0
                self._append(self._events, as_dict(Note(text=text, level="warning")))

    def close(self) -> None:
        """Close both files."""
        with suppress(OSError):
            self._write_all()
        os.close(self._events)
        os.close(self._metrics)


def iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file, without lines that a kill truncated."""
    yield from read_records(path)[0]


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records of a JSONL file, and the number of lines that could not be read."""
    try:
        text = read_regular(path, max_bytes=_MAX_BYTES).decode(errors="replace")
    except OSError:
        return [], 0
    except ValueError:  # a pipe, a device, or a file larger than any run writes
        return [], 1
    records, num_unreadable = [], 0
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            num_unreadable += 1
    return records, num_unreadable


def _open(path: Path) -> int:
    """Open a file to append, and return its descriptor. If its last line is truncated, end the line first."""
    descriptor = open_no_follow(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def _json_value(value: Any) -> Any:
    """Return the value with non-finite numbers as text, because JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return value
