"""Output to a terminal that may be closed: a reader that has exited (`| head -1`, `>&-`) does not end a run."""

import errno
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from paceline.console.escaping import encodable_text

_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_AGE_SECONDS = 86400.0  # of a file with captured output
_reported_reasons: set[str] = set()  # why a log could not be written; each is reported once
_drop_reasons: list[str] = []  # why output was dropped since the last note


def print_line(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print to `stream` (default: standard output) and flush; a stream that can't be written is silenced."""
    target = stream or sys.stdout
    write_safely(lambda: print(encodable_text(text, target), file=target, end=end, flush=True), target)


def write_safely(write: Callable[[], object], stream: TextIO) -> OSError | None:
    """Call `write`, which writes to a stream that may be closed, full or non-blocking. On an error, silence the stream.

    A log on a disk that is full loses this text only, because there may be space again later.

    Return the error, or None if the text was written, the reader has exited, or the job has closed the stream. An
    `OSError` never ends a run.
    """
    if getattr(stream, "closed", False):
        return None
    with suppress(OSError, ValueError):  # a stream that is no file
        if not os.get_blocking(stream.fileno()):
            os.set_blocking(stream.fileno(), True)  # another program has made the terminal non-blocking
    try:
        write()
    except OSError as error:
        is_full_log = error.errno in _DISK_FULL_ERRORS and _is_regular_file(stream)
        if not is_full_log:
            silence_stream(stream)
        reason = error.strerror or str(error)
        if stream is not sys.stderr and not (is_full_log and reason in _reported_reasons):
            _drop_reasons.append(reason)
        if is_full_log:
            _reported_reasons.add(reason)
            return error
        if is_reader_gone(error):
            return None
        if stream is not sys.stderr:
            print_line(f"output can't be written and is dropped: {error.strerror}", sys.stderr)
        return error
    return None


def take_dropped_note() -> str:
    """Return a note for the run's events if output was dropped since the last call; otherwise an empty text."""
    reasons = ", ".join(dict.fromkeys(_drop_reasons))
    _drop_reasons.clear()
    return f"the console can't be written to, and output is lost: {reasons}" if reasons else ""


def _is_regular_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # a stream that is no file
        return False


def is_reader_gone(error: OSError) -> bool:
    """Return whether the error means that the reader has exited (`| head -1`), or that the terminal was closed."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


def flush() -> None:
    """Flush the buffered output of the user's own `print`, before a process exits without Python's own shutdown."""
    for stream in (sys.stdout, sys.stderr):
        print_line("", stream, end="")


def silence_stream(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that buffered and later output is dropped without an error."""
    with suppress(OSError, ValueError):  # a stream that is no file
        descriptor = stream.fileno()
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, descriptor)
        os.close(null_device)


def replace_closed_streams() -> None:
    """Replace a standard stream that was closed at start, for which Python has `None`, by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  for as long as the process lives


class CapturedStderr:
    """The standard error of native code, captured in the file of a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def text(self) -> bytes:
        """Return the captured bytes."""
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def save_to_temporary_file(self, name: str) -> Path | None:
        """Write the captured bytes to a temporary file with this prefix; None if there are none."""
        if not self.text():
            return None
        descriptor, path = tempfile.mkstemp(prefix=name, suffix=".log")
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.text())
        return Path(path)


def _remove_old_captures() -> None:
    """Remove files that killed processes left a day ago or earlier."""
    for path in Path(tempfile.gettempdir()).glob("paceline-join-*.log"):
        with suppress(OSError):  # the file of another user
            if time.time() - path.lstat().st_mtime > _MAX_AGE_SECONDS:
                path.unlink()


@contextmanager
def capture_native_stderr() -> Iterator[CapturedStderr | None]:
    """Return a context that captures what native code writes to standard error, and prints it if the block completes.

    If the block raises an error, the captured text is not printed. A worker process has a log, so it captures nothing
    and yields None. If native code aborts the process, its output remains in a temporary file.
    """
    if "PACELINE_ATTEMPT_FOLDER" in os.environ:
        yield None
        return
    sys.stderr.flush()
    _remove_old_captures()
    with tempfile.NamedTemporaryFile(prefix=f"paceline-join-{os.getpid()}-", suffix=".log", buffering=0) as file:
        saved_stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        captured = CapturedStderr(file.fileno())
        try:
            yield captured
        finally:
            sys.stderr.flush()
            os.dup2(saved_stderr, 2)
            os.close(saved_stderr)
        os.write(2, captured.text())
