"""A fork that begins: each child says so, and one that does not is killed and forked again.

Python 3.11 can hang in the child of a fork before it runs any code: `PyOS_AfterFork_Child` waits for the lock of the
list of threads. Another thread held it at that moment and can't release it, since a fork copies one thread only. A
thread of gloo takes that lock whenever it lets go of a tensor, so a rank that forks data workers right after a
collective met this about once in 200 evaluations. Python 3.12 creates a new lock first.
"""

import os
import select
import signal
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

PATIENCE_SECONDS = (2.0, 4.0, 8.0, 16.0)
"""How long each try is waited for; a last one is left to itself, as it may only be slow."""


class _StartedFork(Popen):
    """Fork until a child has begun."""

    def _launch(self, process_obj: BaseProcess) -> None:
        for seconds in PATIENCE_SECONDS:
            read, write = os.pipe()
            process_obj.begun = (read, write)  # type: ignore[attr-defined]
            super()._launch(process_obj)  # type: ignore[misc]
            os.close(write)
            has_begun = bool(select.select([read], [], [], seconds)[0])  # or has ended: then its end says why
            os.close(read)
            if has_begun:
                return
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            if self.finalizer is not None:  # of the pipes to that child
                self.finalizer()
        process_obj.begun = None  # type: ignore[attr-defined]
        super()._launch(process_obj)  # type: ignore[misc]


class _StartedProcess(ForkProcess):
    """A process that tells its parent that it runs."""

    begun: tuple[int, int] | None = None

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Popen:  # noqa: N802  multiprocessing's own name
        return _StartedFork(process_obj)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        if self.begun is not None:
            read, write = self.begun
            os.write(write, b"1")
            os.close(read)
            os.close(write)
        done: int = super()._bootstrap(parent_sentinel=parent_sentinel)  # type: ignore[misc]
        return done


class StartedForkContext(ForkContext):
    """The `fork` context, as a DataLoader takes it, whose children have all begun when they are started."""

    Process = _StartedProcess


STARTED_FORK = StartedForkContext()
