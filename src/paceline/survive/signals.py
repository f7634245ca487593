"""Signals in a worker: the first asks for a clean stop, a second ends it at once."""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
GENTLE = (signal.SIGUSR1, signal.SIGHUP)  # these ask again without meaning more: a terminal that closes sends several

_PR_SET_PDEATHSIG = 1


def stops_here() -> list[signal.Signals]:
    """The signals to listen for: what `nohup` told this process to pass over when it began stays so."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; leave at once if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class StopFlag:
    """Whether somebody asked this rank to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal is not None

    def install(self) -> None:
        """Listen; outside the main thread, where Python hears no signal, whoever runs the main thread decides."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in stops_here():
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def remove(self) -> None:
        """Listen no more: what was there before does again."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested and number not in GENTLE:
            os._exit(128 + number)
        self.signal = number


stop_flag = StopFlag()
