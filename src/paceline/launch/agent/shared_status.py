"""The memory that a rank shares with its supervisor: heartbeats, the failure text, the exit code and a request to stop.

Each rank writes its heartbeats to the memory-mapped file `pulse-RANK`. A write takes about a microsecond and never
blocks. Each rank also has a slot in one buffer in memory, so that it can report its failure even if the disk is full.
Behind the slots, the ranks write their stacks when the supervisor asks for them (`stack_dumps`).
"""

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.config.settings import Settings
from paceline.launch.inherited_environment import attempt_folder

STATUS_FD = "PACELINE_STATUS_FD"
FINISHED_PHASE = "over"
BUSY_PHASES = ("on_eval", "save")
"""Phases in which all ranks may be silent for long."""
_SLOT_BYTES = 1 << 15
_END_BYTES, _STOP_BYTES = 15, 1
_TEXT_BYTES = _SLOT_BYTES - _END_BYTES - _STOP_BYTES
STACKS_OFFSET = 1 << 32  # where the stack dumps begin: behind the slots of 2^17 ranks
_LAYOUT = struct.Struct("<qqqd16sdqq")


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    monotonic_ns: int
    """When the beat was written; 0 before the first one."""
    step: int
    """The last step that the rank finished."""
    total: int
    """Steps of the whole run; 0 if that is unknown."""
    loss: float
    phase: str
    silence_timeout: float = 0.0
    """Seconds without a new beat after which the supervisor reports this rank as silent; 0 if the rank sets none."""
    max_restarts: int = -1
    """The setting `survive.restarts` of the job; -1 if the rank sets none."""
    start_step: int = -1
    """The step from which this attempt started; -1 if the rank does not say."""

    @property
    def is_sent(self) -> bool:
        """Return whether the rank has sent a heartbeat since it created its page."""
        return self.monotonic_ns > 0


class HeartbeatWriter:
    """The writer of one rank's heartbeat page."""

    def __init__(
        self, path: Path, *, silence_timeout: float = 0.0, max_restarts: int = -1, start_step: int = -1
    ) -> None:
        self._constants = (silence_timeout, max_restarts, start_step)
        path.write_bytes(_LAYOUT.pack(0, 0, 0, 0.0, b"", *self._constants))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)

    def write(self, *, step: int, total: int = 0, loss: float = 0.0, phase: str = "step") -> None:
        """Write this rank's last finished step, its loss and phase, and the time to the page."""
        self._page[:] = _LAYOUT.pack(time.monotonic_ns(), step, total, loss, phase.encode()[:16], *self._constants)

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()


def open_heartbeat(
    rank: int, settings: Settings, *, start_step: int = -1, folder: Path | None = None
) -> HeartbeatWriter | None:
    """Return the writer of this rank's page, or None if nobody reads it.

    `start_step` is the step from which this attempt starts. `folder` is the attempt folder if another launcher started
    this process.
    """
    folder = attempt_folder(os.environ) or folder
    if folder is None:
        return None
    return HeartbeatWriter(
        folder / f"pulse-{rank}",
        silence_timeout=settings.train.timeout_seconds,
        max_restarts=settings.survive.restarts,
        start_step=start_step,
    )


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return the last beat on a rank's page, or None if there is no page yet."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _LAYOUT.size:
        return None
    monotonic_ns, step, total, loss, phase, silence_timeout, max_restarts, start_step = _LAYOUT.unpack(data)
    return Heartbeat(
        monotonic_ns=monotonic_ns,
        step=step,
        total=total,
        loss=loss,
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        silence_timeout=silence_timeout,
        max_restarts=max_restarts,
        start_step=start_step,
    )


def make_status_buffer() -> int:
    """Return the file descriptor of a memory buffer that all ranks inherit; the last process to close it frees it."""
    memfd_create = getattr(os, "memfd_create", None)
    if memfd_create is not None:
        return int(memfd_create("paceline-status"))
    handle, path = tempfile.mkstemp(prefix="paceline-status-")
    os.unlink(path)  # noqa: PTH108  only the handle is needed
    return handle


def clear_status_buffer(status_fd: int) -> None:
    """Clear the slots and the stack dumps of the last attempt, whose processes have all ended."""
    os.ftruncate(status_fd, 0)
    os.lseek(status_fd, STACKS_OFFSET, os.SEEK_SET)


def write_failure_text(status_fd: int, *, rank: int, text: str) -> bool:
    """Write a rank's failure text to its slot; return False if the text is too long."""
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        return False
    return os.pwrite(status_fd, data.ljust(_TEXT_BYTES, b"\0"), rank * _SLOT_BYTES) == _TEXT_BYTES


def read_failure_text(status_fd: int, *, rank: int) -> str:
    """Return the failure text in a rank's slot; an empty string if there is none."""
    return os.pread(status_fd, _TEXT_BYTES, rank * _SLOT_BYTES).rstrip(b"\0").decode(errors="replace")


def write_end(status_fd: int, *, rank: int, code: int) -> None:
    """Record that this rank's entry function or script completed with this exit code. Other exits are not recorded."""
    os.pwrite(status_fd, f"ended {code}".encode().ljust(_END_BYTES, b"\0"), rank * _SLOT_BYTES + _TEXT_BYTES)


def read_end(status_fd: int, *, rank: int) -> int | None:
    """Return the exit code with which a rank's entry function or script completed; None if it did not complete."""
    record = os.pread(status_fd, _END_BYTES, rank * _SLOT_BYTES + _TEXT_BYTES).rstrip(b"\0").decode(errors="replace")
    code = record.removeprefix("ended ")
    return int(code) if record.startswith("ended ") and code.isdecimal() else None


def write_stop(status_fd: int, *, rank: int) -> None:
    """Ask a rank to stop without a signal, which a handler of the job could block."""
    os.pwrite(status_fd, b"s", (rank + 1) * _SLOT_BYTES - _STOP_BYTES)


def read_stop(status_fd: int, *, rank: int) -> bool:
    """Return whether the supervisor asked a rank to stop."""
    return os.pread(status_fd, _STOP_BYTES, (rank + 1) * _SLOT_BYTES - _STOP_BYTES) == b"s"
