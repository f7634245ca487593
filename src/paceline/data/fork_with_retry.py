"""A fork that makes sure that the child runs. Each child reports its start; a child that hangs is killed and replaced.

In Python 3.11 the child of a fork can hang before it runs any code: `PyOS_AfterFork_Child` waits for the lock of the
list of threads. If another thread held this lock during the fork, it is never released in the child, which does not
have that thread. A gloo thread takes this lock whenever it releases a tensor. In about one of 200 evaluations, a rank
hung because it had forked data workers right after a collective. Python 3.12 creates a new lock in the child.
"""

import os
import select
import signal
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

from typing_extensions import override

START_TIMEOUTS = (2.0, 4.0, 8.0, 16.0)
"""The timeouts of the attempts in seconds. The attempt after these does not wait: the machine may only be slow."""


class _StartedFork(Popen):
    """A fork that is repeated until a child has started. Each attempt has a longer timeout; the last does not wait."""

    def _launch(self, process_obj: BaseProcess) -> None:
        for timeout in START_TIMEOUTS:
            read, write = os.pipe()
            process_obj.start_pipe = (read, write)  # type: ignore[attr-defined]
            super()._launch(process_obj)  # type: ignore[misc]
            os.close(write)
            has_started = bool(select.select([read], [], [], timeout)[0])  # also true if the child has exited
            os.close(read)
            if has_started:
                return
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            if self.finalizer is not None:  # closes the pipes to the killed child
                self.finalizer()
        process_obj.start_pipe = None  # type: ignore[attr-defined]
        super()._launch(process_obj)  # type: ignore[misc]


class _StartedProcess(ForkProcess):
    """A process that reports its start to its parent."""

    start_pipe: tuple[int, int] | None = None

    @staticmethod
    @override
    def _Popen(process_obj: BaseProcess) -> Popen:
        return _StartedFork(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        if self.start_pipe is not None:
            read, write = self.start_pipe
            os.write(write, b"1")
            os.close(read)
            os.close(write)
        exit_code: int = super()._bootstrap(parent_sentinel=parent_sentinel)  # type: ignore[misc]
        return exit_code


class StartedForkContext(ForkContext):
    """A multiprocessing `fork` context. `start()` waits until the child runs; only its last attempt does not wait."""

    Process = _StartedProcess


STARTED_FORK = StartedForkContext()
