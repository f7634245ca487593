"""Signal handling in a worker: the first signal asks for a clean stop, a second ends the process at once."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,  # sent by submitit and many Slurm scripts
    signal.SIGHUP,
    signal.SIGXCPU,  # the CPU time limit of a scheduler or `ulimit -t`
)
GENTLE = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
"""Signals that are ignored after the first request: a closing terminal or a scheduler may send several."""

_PR_SET_PDEATHSIG = 1


def stops_here() -> list[signal.Signals]:
    """Return the signals to listen for; SIGHUP is excluded if `nohup` made this process ignore it."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def is_main_thread() -> bool:
    """Return whether this is the main thread, the only one in which Python runs signal handlers."""
    return threading.current_thread() is threading.main_thread()


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once if the parent has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class StopFlag:
    """A flag that says whether this rank was asked to stop.

    The job, or a library that it loads, may install handlers for the same signals at any time: `reinstall` puts this
    flag's handler in front of them, and a signal reaches both. `poll_stop_request` also reads a request of the agent
    from shared memory, which no handler can block.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked: Callable[[], bool] | None = None
        self._before: dict[int, Any] = {}
        self._theirs: dict[int, Any] = {}
        self._ends_process = False
        self._passes_on = False
        self._pid = 0
        self._is_known_to_forks = False

    @property
    def requested(self) -> bool:
        """Return whether a signal arrived, or the agent asked this rank to stop."""
        return self.signal is not None or (self._asked is not None and self._asked())

    def install(
        self, *, ends_process: bool = True, passes_on: bool = False, asked: Callable[[], bool] | None = None
    ) -> None:
        """Install the handlers; do nothing outside the main thread, where Python runs no signal handlers.

        A second signal ends the process if `ends_process`, else it reaches the previous handler. Forked processes
        remove the handlers, unless `listens_in_forks`.
        """
        self._asked = asked or self._asked
        if not is_main_thread():
            return
        self._ends_process, self._passes_on, self._pid = ends_process, passes_on, os.getpid()
        if not self._is_known_to_forks:
            os.register_at_fork(after_in_child=self._forked)
            self._is_known_to_forks = True
        for number in stops_here():
            before = signal.getsignal(number)
            if before is None or before == self._handle:  # None: set by native code, can't be restored
                continue
            signal.signal(number, self._handle)
            self._before[number] = before
            self._theirs[number] = before

    def renew(self) -> None:
        """Put this handler in front of those that the job installed since: a signal sets the flag and reaches both."""
        if not is_main_thread() or self._pid != os.getpid():
            return
        for number in self._before:
            now = signal.getsignal(number)
            if now != self._handle:
                self._theirs[number] = now
                signal.signal(number, self._handle)

    def remove(self) -> None:
        """Stop listening, clear the request, and restore the previous handlers, or those installed since."""
        self.signal = None
        if not is_main_thread():
            return
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._handle:
                theirs = self._theirs.pop(number, before)
                signal.signal(number, signal.SIG_DFL if theirs is None else theirs)
        self._theirs.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        theirs = self._theirs.get(number)
        if self.signal is not None and number not in GENTLE:
            self._end(number, frame, theirs)
        self.signal = number
        if callable(theirs) and theirs is not signal.default_int_handler:
            with suppress(BaseException):  # it may raise to end the program; the run ends after saving instead
                theirs(number, frame)

    def _end(self, number: int, frame: FrameType | None, theirs: Any) -> None:
        if self._ends_process:
            os._exit(128 + number)
        signal.signal(number, signal.SIG_DFL if theirs is None else theirs)
        if callable(theirs):
            theirs(number, frame)
        else:
            os.kill(os.getpid(), number)

    def _forked(self) -> None:
        """Remove the handlers in a forked child, so that a signal ends it: terminating a pool relies on that."""
        if not self._passes_on and self._pid != os.getpid():
            self._asked = None
            self.remove()


stop_flag = StopFlag()
