"""A shared memory buffer for the ranks' last words: if the run's disk is full, no file can carry them."""

import os
import tempfile

STATUS_FD = "PACELINE_STATUS_FD"
_BYTES = 1 << 15
_WORD_BYTES, _STOP_BYTES = 15, 1
_TEXT_BYTES = _BYTES - _WORD_BYTES - _STOP_BYTES


def make_status_buffer() -> int:
    """Return the handle of a buffer that all ranks inherit by fork; it is freed with the last of them."""
    in_memory = getattr(os, "memfd_create", None)
    if in_memory is not None:
        return int(in_memory("paceline-last-words"))
    handle, path = tempfile.mkstemp(prefix="paceline-last-words-")
    os.unlink(path)  # noqa: PTH108  the handle is all that is wanted of it
    return handle


def write_failure_text(status_fd: int, *, rank: int, text: str) -> bool:
    """Write a rank's text to its own slot; return False if the text is too long."""
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        return False
    return os.pwrite(status_fd, data.ljust(_TEXT_BYTES, b"\0"), rank * _BYTES) == _TEXT_BYTES


def read_failure_text(status_fd: int, *, rank: int) -> str:
    """Return the text in a rank's slot; an empty string if there is none."""
    return os.pread(status_fd, _TEXT_BYTES, rank * _BYTES).rstrip(b"\0").decode(errors="replace")


def write_end(status_fd: int, *, rank: int, code: int) -> None:
    """Record that this rank's entry returned by itself with this exit code. No other way to exit records this."""
    os.pwrite(status_fd, f"ended {code}".encode().ljust(_WORD_BYTES, b"\0"), rank * _BYTES + _TEXT_BYTES)


def read_end(status_fd: int, *, rank: int) -> int | None:
    """Return the exit code with which a rank's entry returned by itself, or None if it never did."""
    word = os.pread(status_fd, _WORD_BYTES, rank * _BYTES + _TEXT_BYTES).rstrip(b"\0").decode(errors="replace")
    code = word.removeprefix("ended ")
    return int(code) if word.startswith("ended ") and code.isdecimal() else None


def write_stop(status_fd: int, *, rank: int) -> None:
    """Ask this rank to stop, independent of its signal handlers."""
    os.pwrite(status_fd, b"s", (rank + 1) * _BYTES - _STOP_BYTES)


def read_stop(status_fd: int, *, rank: int) -> bool:
    """Return whether this rank was asked to stop."""
    return os.pread(status_fd, _STOP_BYTES, (rank + 1) * _BYTES - _STOP_BYTES) == b"s"
