"""The activity of a rank: a thread in each rank writes it to a page, which other processes read.

Twice a second, the thread writes the time, the stack of the main thread, and the last exchange with other ranks to the
file `activity-RANK` in the attempt folder. The supervisor reads these pages to find the rank that the others wait for,
and `paceline why` prints them. No signal is sent, so that no system call of the job is interrupted.

The thread needs Python's global interpreter lock (GIL). If the page of a running process is not written for seconds,
native code holds this lock.
"""

import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

import msgspec

from paceline.bytes_sent import Traffic
from paceline.launch.failures.stack_dumps import Frame, Stack

INTERVAL_SECONDS = 0.5
_PAGE_BYTES = 1 << 14
_HEADER = struct.Struct("<II")  # length and CRC of the JSON text that follows
_MAX_FRAMES, _MAX_UNFINISHED = 60, 4
_FLIGHT_RECORDER_INTERVAL = 4  # pages from one reading to the next
_READ_ATTEMPTS = 5
_OUTERMOST_FILE = "/paceline/launch/agent/worker_process.py"  # the frames around it belong to no rank


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The activity of a rank at a point in time. `frames` is the stack of its main thread, the innermost first."""

    pid: int
    monotonic_ns: int
    frames: tuple[Frame, ...] = ()
    start_ns: int = 0
    """When the rank created its page."""
    num_operations: int = 0
    """How many collectives and sends this rank has started."""
    last_operation: str = ""
    """The kind of the last one, such as `all_reduce`; empty if there was none."""
    unfinished: tuple[str, ...] = ()
    """The collectives that have not completed, from torch's flight recorder, if this rank has waited for a while."""

    @property
    def stack(self) -> Stack:
        """The stack of the main thread."""
        return Stack(frames=self.frames)


class ActivityReporter:
    """The writer of this rank's page. `traffic` and `list_unfinished` are set once the rank has joined the others."""

    def __init__(self) -> None:
        self.traffic: Traffic | None = None
        self.list_unfinished: Callable[[], list[str]] | None = None
        self._unfinished: tuple[str, ...] = ()
        self._position: tuple[tuple[Frame, ...], int] = ((), 0)  # stack, and number of operations
        self._num_same_positions = 0
        self._stopped = threading.Event()

    def start(self, path: Path) -> None:
        """Create the page, and start the thread that writes to it until `stop`, or until the process ends.

        Nothing is reported if the disk has no space for the page.
        """
        self.stop()
        try:
            path.write_bytes(bytes(_PAGE_BYTES))
            page_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        self._stopped, start_ns = threading.Event(), time.monotonic_ns()
        with suppress(Exception):
            self._write(page_fd, start_ns=start_ns)
        threading.Thread(
            target=self._run, args=(page_fd, start_ns, self._stopped), name="paceline-activity", daemon=True
        ).start()

    def stop(self) -> None:
        """Ask the thread to end, if there is one."""
        self._stopped.set()

    def _run(self, page_fd: int, start_ns: int, stopped: threading.Event) -> None:
        with suppress(Exception):  # a rank without a page still trains
            while not stopped.wait(INTERVAL_SECONDS):
                self._write(page_fd, start_ns=start_ns)
        os.close(page_fd)

    def _write(self, page_fd: int, *, start_ns: int) -> None:
        """Write the page. The system call releases the GIL, so that a slow disk does not stop the training."""
        traffic = self.traffic or Traffic()
        frames = _main_thread_frames()
        self._update_unfinished((frames, traffic.num_operations))
        unfinished = self._unfinished
        while True:
            activity = Activity(
                pid=os.getpid(),
                monotonic_ns=time.monotonic_ns(),
                start_ns=start_ns,
                frames=frames,
                num_operations=traffic.num_operations,
                last_operation=traffic.last_operation,
                unfinished=unfinished,
            )
            text = msgspec.json.encode(activity)
            if _HEADER.size + len(text) <= _PAGE_BYTES or not frames:
                break
            frames, unfinished = frames if unfinished else frames[: len(frames) // 2], ()
        os.pwrite(page_fd, _HEADER.pack(len(text), zlib.crc32(text)) + text, 0)

    def _update_unfinished(self, position: tuple[tuple[Frame, ...], int]) -> None:
        """Read the flight recorder if this rank waits for others at the same place as last time.

        It is not read every time, because that takes 20 us for each collective that torch remembers (2,000). An error
        turns it off, because the functions are private.
        """
        is_same = position == self._position and Stack(frames=position[0]).is_waiting_for_ranks
        self._position, self._num_same_positions = position, self._num_same_positions + 1 if is_same else 0
        is_due = (self._num_same_positions - 1) % _FLIGHT_RECORDER_INTERVAL == 0
        if not is_same:
            self._unfinished = ()
        elif self.list_unfinished is not None and is_due:
            try:
                self._unfinished = tuple(self.list_unfinished()[:_MAX_UNFINISHED])
            except Exception:
                self.list_unfinished = None


activity_reporter = ActivityReporter()
"""The reporter of this process, because a process is one rank."""


def activity_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's page in an attempt folder."""
    return folder / f"activity-{rank}"


def read_rank_activity(folder: Path, rank: int) -> Activity | None:
    """Return what a rank wrote last, or None if it wrote nothing yet."""
    for _ in range(_READ_ATTEMPTS):  # the rank may be writing at this moment
        try:
            data = activity_path(folder, rank).read_bytes()
            length, checksum = _HEADER.unpack_from(data)
            text = data[_HEADER.size : _HEADER.size + length]
            if length and zlib.crc32(text) == checksum:
                return msgspec.json.decode(text, type=Activity)
        except (OSError, struct.error, msgspec.MsgspecError):
            return None
    return None


def _main_thread_frames() -> tuple[Frame, ...]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return tuple(islice(_outward_frames(frame), _MAX_FRAMES))


def _outward_frames(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None and not frame.f_code.co_filename.endswith(_OUTERMOST_FILE):
        if frame.f_code.co_filename != __file__:
            file = frame.f_code.co_filename.encode(errors="backslashreplace").decode()
            yield Frame(file=file, line=frame.f_lineno or 0, function=frame.f_code.co_name)
        frame = frame.f_back
