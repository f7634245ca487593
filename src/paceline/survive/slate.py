"""A place in memory for the ranks' last words: where the run's disk is full, no file can carry them."""

import os
import tempfile

SLATE = "PACELINE_SLATE"
_BYTES = 1 << 15


def make_slate() -> int:
    """A handle that the agent makes and all ranks are forked with; it goes with the last of them."""
    in_memory = getattr(os, "memfd_create", None)
    if in_memory is not None:
        return int(in_memory("paceline-last-words"))
    handle, path = tempfile.mkstemp(prefix="paceline-last-words-")
    os.unlink(path)  # noqa: PTH108  the handle is all that is wanted of it
    return handle


def write_slate(slate: int, *, rank: int, text: str) -> bool:
    """Put a rank's words in its own place; False where they are too long for it."""
    data = text.encode()
    if len(data) > _BYTES:
        return False
    return os.pwrite(slate, data.ljust(_BYTES, b"\0"), rank * _BYTES) == _BYTES


def read_slate(slate: int, *, rank: int) -> str:
    """What a rank has put there; empty where that is nothing."""
    return os.pread(slate, _BYTES, rank * _BYTES).rstrip(b"\0").decode(errors="replace")
