"""Output to a terminal that may be closed: a reader that has exited (`| head -1`, `>&-`) does not end a run."""

import codecs
import errno
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_PLAIN = {"✓": "ok", "✗": "x", "×": "x", "·": "-", "•": "*", "…": "...", "→": "->", "≤": "<=", "≥": ">="}
_PLAINLY = "paceline.plainly"
_KEPT_SECONDS = 86400.0
_dropped_because: list[str] = []
_TURNS = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # they end a line, or change the direction of text
_COMMANDS = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNS}]")
_COMMANDS_OF_A_JOB = re.compile(f"\x1b(?!\\[[0-9;]*m)|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f{_TURNS}]")


def encodable_text(text: str, stream: TextIO) -> str:
    """Return the text in the stream's encoding, with terminal control sequences escaped.

    Names and messages may come from untrusted files: an escape sequence in one could overwrite earlier output.
    """
    return _encodable(_COMMANDS.sub(_as_escape, text), stream)


def fitting_print(text: str, stream: TextIO) -> str:
    """Return a line that the user's own code printed, with its colours and carriage returns kept."""
    return _encodable(_COMMANDS_OF_A_JOB.sub(_as_escape, text), stream)


def _as_escape(found: re.Match[str]) -> str:
    return "".join(f"\\x{ord(mark):02x}" if ord(mark) < 256 else f"\\u{ord(mark):04x}" for mark in found[0])


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _PLAINLY).decode(encoding)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(mark, "?") for mark in error.object[error.start : error.end]), error.end


codecs.register_error(_PLAINLY, _plainly)


def print_line(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print to `stream` (default: standard output) at once; a stream that can't be written is silenced."""
    to = stream or sys.stdout
    with_no_reader(lambda: print(encodable_text(text, to), file=to, end=end, flush=True), to)


def with_no_reader(write: Callable[[], object], stream: TextIO) -> OSError | None:
    """Write to a stream that may be closed, full or non-blocking; silence it on an error.

    Return the error, unless the reader has exited. A failure to print never ends a run.
    """
    with suppress(OSError, ValueError):  # a stream that is no file
        if not os.get_blocking(stream.fileno()):
            os.set_blocking(stream.fileno(), True)  # another program has made the terminal non-blocking
    try:
        write()
    except OSError as error:
        silence_stream(stream)
        if stream is not sys.stderr:
            _dropped_because.append(error.strerror or str(error))
        if is_gone(error):
            return None
        if stream is not sys.stderr:
            print_line(f"output can't be written and is dropped: {error.strerror}", sys.stderr)
        return error
    return None


def take_dropped_note() -> str:
    """Return the sentence for a run's events if output was dropped since the last call; otherwise an empty text."""
    reasons = ", ".join(dict.fromkeys(_dropped_because))
    _dropped_because.clear()
    return f"the console can't be written to and is silent from here on: {reasons}" if reasons else ""


def is_gone(error: OSError) -> bool:
    """Return whether the error means that the reader has exited (`| head -1`), or that the terminal was closed."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


def flush() -> None:
    """Flush what the user's own `print` left buffered, before a process exits without Python's own shutdown."""
    for stream in (sys.stdout, sys.stderr):
        print_line("", stream, end="")


def silence_stream(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that buffered and later output is dropped without an error."""
    with suppress(OSError, ValueError):  # a stream that is no file
        handle = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)


def replace_closed() -> None:
    """Replace a standard stream that was closed at start, for which Python has `None`, by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  for as long as the process lives


class CapturedStderr:
    """The captured standard error of native code, in a file until it is printed."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def text(self) -> bytes:
        """Return the captured bytes."""
        return os.pread(self._handle, os.fstat(self._handle).st_size, 0)

    def keep(self, name: str) -> Path | None:
        """Write the captured bytes to a temporary file with this prefix; None if there are none."""
        if not self.text():
            return None
        handle, path = tempfile.mkstemp(prefix=name, suffix=".log")
        with os.fdopen(handle, "wb") as file:
            file.write(self.text())
        return Path(path)


def _remove_old_words() -> None:
    """Remove files that killed processes left a day ago or earlier."""
    for path in Path(tempfile.gettempdir()).glob("paceline-join-*.log"):
        with suppress(OSError):  # another user's
            if time.time() - path.lstat().st_mtime > _KEPT_SECONDS:
                path.unlink()


@contextmanager
def capture_native_stderr() -> Iterator[CapturedStderr | None]:
    """Capture what native code writes to standard error inside the block; it is printed at the end of the block.

    A worker process has a log and captures nothing. If native code aborts, its output remains in a temporary file.
    """
    if "PACELINE_ATTEMPT_FOLDER" in os.environ:
        yield None
        return
    sys.stderr.flush()
    _remove_old_words()
    with tempfile.NamedTemporaryFile(prefix=f"paceline-join-{os.getpid()}-", suffix=".log", buffering=0) as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        said = CapturedStderr(file.fileno())
        try:
            yield said
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
        os.write(2, said.text())
