"""Signal handling in a worker: the first signal asks for a clean stop, and a second one may end the process."""

import _signal  # type: ignore[import-not-found]
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
IGNORED_WHEN_REPEATED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU)
"""Signals that are ignored after the first stop request, because a scheduler or a closing terminal may send several."""

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2  # from linux/prctl.h


def active_stop_signals() -> list[signal.Signals]:
    """Return the signals to listen for; SIGHUP is excluded if `nohup` made this process ignore it."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def is_main_thread() -> bool:
    """Return whether this is the main thread, the only one in which Python runs signal handlers."""
    return threading.current_thread() is threading.main_thread()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies; exit at once if the parent has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class StopFlag:
    """A flag that says whether this rank was asked to stop.

    The job, or a library that it loads, may install handlers for the same signals at any time. `reinstall` puts this
    flag's handler in front of them, and a signal then reaches both. The function `poll_stop_request` reads the
    supervisor's stop request from shared memory, which no handler can block.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the stop signal that arrived last
        self._poll_stop_request: Callable[[], bool] | None = None
        self._original_handlers: dict[int, Any] = {}
        self._job_handlers: dict[int, Any] = {}
        self._ends_process = False
        self._listens_in_forks = False
        self._pid = 0
        self._has_fork_hook = False

    @property
    def is_requested(self) -> bool:
        """Return whether a signal arrived, or the supervisor asked this rank to stop."""
        return self.signal is not None or (self._poll_stop_request is not None and self._poll_stop_request())

    def install(
        self,
        *,
        ends_process: bool = True,
        listens_in_forks: bool = False,
        poll_stop_request: Callable[[], bool] | None = None,
    ) -> None:
        """Install the handlers, and store `poll_stop_request`.

        Outside the main thread, no handlers are installed, because Python runs them only in the main thread.

        A second signal ends the process if `ends_process`, else it reaches the previous handler. With
        `poll_stop_request`, it does nothing: the supervisor decides when to kill this process, and a scheduler such as
        Slurm signals all processes, while the supervisor passes the same request on. Forked processes keep the handlers
        if `listens_in_forks`, else they remove them.
        """
        self._poll_stop_request = poll_stop_request or self._poll_stop_request
        if not is_main_thread():
            return
        self._ends_process, self._listens_in_forks, self._pid = ends_process, listens_in_forks, os.getpid()
        if not self._has_fork_hook:
            os.register_at_fork(after_in_child=self._on_fork)
            self._has_fork_hook = True
        for number in active_stop_signals():
            handler = signal.getsignal(number)
            if handler is None or handler == self._on_signal:  # None: set by native code, can't be restored
                continue
            signal.signal(number, self._on_signal)
            self._original_handlers[number] = handler
            self._job_handlers[number] = handler

    def reinstall(self) -> None:
        """Put this flag's handler back in front of handlers that the job has installed; a signal then reaches both."""
        if not is_main_thread() or self._pid != os.getpid():
            return
        for number in self._original_handlers:
            # `signal.getsignal` would take 3 us here in every step, because it tries to convert a function to an enum.
            handler = _signal.getsignal(number)
            if handler != self._on_signal:
                self._job_handlers[number] = handler
                signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Clear the request, and restore the handlers that this flag's handler replaced. Later handlers stay."""
        self.signal = None
        if not is_main_thread():
            return
        while self._original_handlers:
            number, original_handler = self._original_handlers.popitem()
            if signal.getsignal(number) == self._on_signal:
                handler = self._job_handlers.pop(number, original_handler)
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._job_handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        job_handler = self._job_handlers.get(number)
        if self.signal is not None and number not in IGNORED_WHEN_REPEATED:
            self._on_repeated_signal(number, frame, job_handler)
        self.signal = number
        if callable(job_handler) and job_handler is not signal.default_int_handler:
            with suppress(BaseException):  # the job's handler may raise; the run saves first and then ends
                job_handler(number, frame)

    def _on_repeated_signal(self, number: int, frame: FrameType | None, job_handler: Any) -> None:
        if self._ends_process and self._poll_stop_request is not None:
            return
        if self._ends_process:
            os._exit(128 + number)
        signal.signal(number, signal.SIG_DFL if job_handler is None else job_handler)
        if callable(job_handler):
            job_handler(number, frame)
        else:
            os.kill(os.getpid(), number)

    def _on_fork(self) -> None:
        """Remove the handlers in a forked child, so that a signal ends it, as `Pool.terminate` expects."""
        if not self._listens_in_forks and self._pid != os.getpid():
            self._poll_stop_request = None
            self.remove()


stop_flag = StopFlag()
