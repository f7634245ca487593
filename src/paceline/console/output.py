"""Words to a terminal that may be gone: that nobody reads any more (`| head -1`, `>&-`) is no reason to end a run."""

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
_TURNS = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # they end a line, or turn the direction of what follows
_COMMANDS = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_TURNS}]")
_COMMANDS_OF_A_JOB = re.compile(f"\x1b(?!\\[[0-9;]*m)|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f{_TURNS}]")


def encodable_text(text: str, stream: TextIO) -> str:
    """The text with other marks where the stream's encoding lacks ours, and without what would command a terminal.

    Names and messages come from files of strangers: an escape sequence in one could write over what was said.
    """
    return _encodable(_COMMANDS.sub(_as_escape, text), stream)


def fitting_print(text: str, stream: TextIO) -> str:
    """A line that the user's own code printed: the same, with its colours and its returns to the line's start."""
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
    """Print to `stream` (the standard output) at once; to nowhere from then on where it can't be written."""
    to = stream or sys.stdout
    with_no_reader(lambda: print(encodable_text(text, to), file=to, end=end, flush=True), to)


def with_no_reader(write: Callable[[], object], stream: TextIO) -> OSError | None:
    """Write to a stream that may be gone, full, or not ready; then it is silent. Return why, unless its reader left.

    What is said is no part of a run: that it can't be written is no reason to end one.
    """
    with suppress(OSError, ValueError):  # a stream that is no file
        if not os.get_blocking(stream.fileno()):
            os.set_blocking(stream.fileno(), True)  # another program has told the terminal not to wait
    try:
        write()
    except OSError as error:
        silence_stream(stream)
        if is_gone(error):
            return None
        if stream is not sys.stderr:
            print_line(f"what is said here can't be written and is left out: {error.strerror}", sys.stderr)
        return error
    return None


def is_gone(error: OSError) -> bool:
    """Whether it means that the reader has left (`| head -1`), or that the terminal was closed."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


def flush() -> None:
    """What the user's own `print` left behind, before a process leaves without Python's own way down."""
    for stream in (sys.stdout, sys.stderr):
        print_line("", stream, end="")


def silence_stream(stream: TextIO) -> None:
    """What is still in it and what comes goes nowhere, and raises nothing."""
    with suppress(OSError, ValueError):  # a stream that is no file
        handle = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        os.close(nowhere)


def replace_closed() -> None:
    """Python has `None` for a standard stream that was closed before it began; others expect a stream there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  for as long as the process lives


class CapturedStderr:
    """What native code has said on the standard error, in a file that is there until it can be said."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def text(self) -> bytes:
        """Return it."""
        return os.pread(self._handle, os.fstat(self._handle).st_size, 0)

    def keep(self, name: str) -> Path | None:
        """Write it to a temporary file of this name for whoever wants all of it; None where nothing was said."""
        if not self.text():
            return None
        handle, path = tempfile.mkstemp(prefix=name, suffix=".log")
        with os.fdopen(handle, "wb") as file:
            file.write(self.text())
        return Path(path)


def _remove_old_words() -> None:
    """Remove the files that processes which were killed have left a day ago or earlier."""
    for path in Path(tempfile.gettempdir()).glob("paceline-join-*.log"):
        with suppress(OSError):  # another user's
            if time.time() - path.lstat().st_mtime > _KEPT_SECONDS:
                path.unlink()


@contextmanager
def capture_native_stderr() -> Iterator[CapturedStderr | None]:
    """Hold back what native code says on the standard error meanwhile; it follows once all went well.

    A worker of ours has a log for it. Where native code aborts meanwhile, what it said stays in a temporary file.
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
