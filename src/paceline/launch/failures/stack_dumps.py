"""Stack dumps of silent processes: each rank, and each data worker that it forks, writes its stack on request.

`faulthandler` writes it from a signal handler in C, so that a process in a deadlock or an endless loop answers too. The
stacks are written behind the ranks' slots of the shared status buffer, in memory that the supervisor reads.
"""

import faulthandler
import linecache
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from paceline.user_code import is_user_file

_SIGNAL = int(getattr(signal, "SIGRTMIN", 0)) + 5 if hasattr(signal, "SIGRTMIN") else 0
_ANSWER_SECONDS, _POLL_SECONDS = 1.0, 0.02
_MAX_BYTES, _MAX_LINE_CHARACTERS = 1 << 20, 100
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_EXIT_CODE_FIELD = 49  # of /proc/PID/stat, counted from the state of the process
_DATALOADER_FILE = "/torch/utils/data/dataloader.py"
CRASH_MARKER = "Fatal Python error: "
"""The start of what `faulthandler` writes into a rank's log if native code crashes."""
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""The signals for which `faulthandler` writes a stack."""
_CRASH_LINES = ("Stack (", "  File ", "  <", "  ...", "Current thread", "Thread 0x", "Extension modules")
_COMMUNICATION_FILES = ("/torch/distributed/", "/paceline/comm/process_group.py")
_LOCAL_FILES = ("/paceline/data/", "/paceline/checkpoint/", "/paceline/filesystem/", "/paceline/faults.py")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame of a stack: file, line and function. As text, a file in the working folder has a relative path."""

    file: str
    line: int
    function: str

    @override
    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()[:_MAX_LINE_CHARACTERS]
        shown = Path(self.file)
        with suppress(OSError, ValueError):  # the working folder may have been removed, or is no parent of the file
            shown = shown.relative_to(Path.cwd())
        return f"{shown}:{self.line} ({self.function})" + (f": {text}" if text else "")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The frames of a process's main thread, the innermost first; empty if it did not answer."""

    frames: tuple[Frame, ...] = ()

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """Return the frames in the user's own code."""
        return tuple(frame for frame in self.frames if is_user_file(frame.file))

    @property
    def is_waiting_for_ranks(self) -> bool:
        """Return whether the process probably waits for other ranks.

        This is assumed inside a collective or another exchange with other ranks. It is also assumed if the innermost
        frame is in Paceline, except for code that works alone: it reads data, writes files or injects faults.
        """
        is_exchanging = any(part in frame.file for frame in self.frames[:12] for part in _COMMUNICATION_FILES)
        innermost_file = self.frames[0].file if self.frames else ""
        return is_exchanging or (
            "/paceline/" in innermost_file
            and not any(part in innermost_file for part in _LOCAL_FILES)
            and not is_user_file(innermost_file)
        )

    @property
    def is_waiting_for_data(self) -> bool:
        """Return whether the process waits for a batch from a data worker."""
        return any(frame.file.endswith(_DATALOADER_FILE) for frame in self.frames[:12])


def install_stack_handler(status_fd: int) -> None:
    """Register a signal handler that writes the stacks of this process into the status buffer, behind all slots.

    Processes that this process forks inherit the handler.
    """
    if _SIGNAL:
        with suppress(OSError, RuntimeError, ValueError):
            faulthandler.register(_SIGNAL, file=status_fd, all_threads=True)


def request_stack(pid: int, status_fd: int) -> Stack:
    """Ask a process for its stack and wait for at most a second; without an answer the stack is empty."""
    if not _SIGNAL or not has_signal_handler(pid, _SIGNAL):
        return Stack()
    start = os.lseek(status_fd, 0, os.SEEK_CUR)
    try:
        os.kill(pid, _SIGNAL)
    except ProcessLookupError:
        return Stack()
    end, deadline = start, time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        offset = os.lseek(status_fd, 0, os.SEEK_CUR)
        if offset == end > start:
            break
        end = offset
    return parse_stack(os.pread(status_fd, min(end - start, _MAX_BYTES), start).decode(errors="replace"))


def install_crash_handler() -> None:
    """Let this process write the stack of the crashing thread to its standard error if native code crashes."""
    with suppress(OSError, RuntimeError, ValueError):
        faulthandler.enable(file=2, all_threads=False)


def read_crash_stack(log: Path) -> Stack:
    """Return the stack that a rank wrote into its log when native code crashed; empty if the log does not end with one.

    A stack in the middle of the log belongs to a process that the rank has forked.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MAX_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return Stack()
    _, marker, dump = text.rpartition(CRASH_MARKER)
    lines = dump.splitlines()[1:]
    return parse_stack("\n".join(lines)) if marker and all(map(is_crash_line, lines)) else Stack()


def is_crash_line(line: str) -> bool:
    """Return whether a line may belong to a stack that `faulthandler` writes, after its first line."""
    return not line.strip() or line.startswith(_CRASH_LINES)


def parse_stack(text: str) -> Stack:
    """Parse a `faulthandler` dump and return the stack of the thread that got the signal, the main one."""
    blocks = [block for block in re.split(r"\n(?=(?:Current thread|Thread) 0x)", text) if block.strip()]
    main_thread = next((block for block in blocks if block.startswith("Current thread")), blocks[-1] if blocks else "")
    matches = [_FRAME.match(line) for line in main_thread.splitlines()]
    frames = [Frame(file=m["file"], line=int(m["line"]), function=m["function"]) for m in matches if m is not None]
    return Stack(frames=tuple(frames))


def has_signal_handler(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; True if that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return True
    return bool(mask >> (number - 1) & 1)


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state; an empty string if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def exit_status(pid: int) -> int | None:
    """Return the exit code of a process that has ended, negative for a signal.

    Return None if its parent has already read the code, or if the kernel does not show it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD])) if fields[0] == "Z" else None
    except (OSError, IndexError, ValueError):
        return None


def forked_children(pid: int) -> list[int]:
    """Return the PIDs of a process's children that inherited its stack handler by fork, such as data workers."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                pids.append(int(entry.parent.name))
    return sorted(
        child for child in pids if process_state(child) not in ("Z", "X", "") and has_signal_handler(child, _SIGNAL)
    )
