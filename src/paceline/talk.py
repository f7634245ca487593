"""Words to a terminal that may be gone: that nobody reads any more (`| head -1`, `>&-`) is no reason to end a run."""

import codecs
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_PLAIN = {"✓": "ok", "✗": "x", "×": "x", "·": "-", "•": "*", "…": "...", "→": "->", "≤": "<=", "≥": ">="}
_PLAINLY = "paceline.plainly"


def fitting(text: str, stream: TextIO) -> str:
    """The text with other marks where the stream's encoding lacks ours."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _PLAINLY).decode(encoding)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(mark, "?") for mark in error.object[error.start : error.end]), error.end


codecs.register_error(_PLAINLY, _plainly)


def say(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print to `stream` (the standard output) at once; to nowhere from then on if its reader has left."""
    to = stream or sys.stdout
    try:
        print(fitting(text, to), file=to, end=end, flush=True)
    except OSError as error:
        if not is_gone(error):
            raise
        silence(to)


def is_gone(error: OSError) -> bool:
    """Whether it means that the reader has left (`| head -1`), or that the terminal was closed."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


def flush() -> None:
    """What the user's own `print` left behind, before a process leaves without Python's own way down."""
    for stream in (sys.stdout, sys.stderr):
        try:
            say("", stream, end="")
        except OSError:  # a full disk
            silence(stream)


def silence(stream: TextIO) -> None:
    """What is still in it and what comes goes nowhere, and raises nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def replace_closed() -> None:
    """Python has `None` for a standard stream that was closed before it began; others expect a stream there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  for as long as the process lives


@contextmanager
def aside(name: str) -> Iterator[Path | None]:
    """What native code says on the standard error meanwhile waits in a file; it follows once all went well.

    If it ends in an error the file stays, for whoever wants all of it. A worker of ours has a log for it.
    """
    if "PACELINE_ATTEMPT_FOLDER" in os.environ:
        yield None
        return
    sys.stderr.flush()
    handle, path = tempfile.mkstemp(prefix=name, suffix=".log")
    kept = os.dup(2)
    os.dup2(handle, 2)
    os.close(handle)
    try:
        yield Path(path)
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
    os.write(2, Path(path).read_bytes())
    Path(path).unlink()
