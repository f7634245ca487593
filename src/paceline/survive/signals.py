"""Signals in a worker: the first asks for a clean stop, a second ends it at once."""

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """Whether somebody asked this rank to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal is not None

    def install(self) -> None:
        """Listen; the main thread calls this."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested and number != signal.SIGUSR1:
            os._exit(128 + number)
        self.signal = number


stop_flag = StopFlag()
