"""Heartbeats: a small shared page per rank that costs about a microsecond to write and never blocks."""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqqd16s")


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's last sign of life."""

    monotonic_ns: int
    step: int
    total: int
    loss: float
    phase: str


class Pulse:
    """One rank's page."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _LAYOUT.size)

    def beat(self, *, step: int, total: int = 0, loss: float = 0.0, phase: str = "step") -> None:
        """Say where this rank is."""
        self._page[:] = _LAYOUT.pack(time.monotonic_ns(), step, total, loss, phase.encode()[:16])

    def close(self) -> None:
        """Let the page go."""
        self._page.close()


def read_pulse(path: Path) -> Beat | None:
    """A rank's page, or None while there is none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _LAYOUT.size:
        return None
    when, step, total, loss, phase = _LAYOUT.unpack(data)
    return Beat(
        monotonic_ns=when,
        step=step,
        total=total,
        loss=loss,
        phase=phase.rstrip(b"\0").decode(errors="replace"),
    )
