"""Words to a terminal that may be gone: that nobody reads any more (`| head -1`, `>&-`) is no reason to end a run."""

import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print to `stream` (the standard output) at once; to nowhere from then on if its reader has left."""
    to = stream or sys.stdout
    try:
        print(text, file=to, end=end, flush=True)
    except BrokenPipeError:
        silence(to)


def flush() -> None:
    """What the user's own `print` left behind, before a process leaves without Python's own way down."""
    for stream in (sys.stdout, sys.stderr):
        say("", stream, end="")


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
