"""The threads of replicas: the first replica runs in the calling thread, the others in a pool of threads."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from typing_extensions import override

from paceline.comm.rank_threads import PeerFailed

T = TypeVar("T")
PATIENCE_SECONDS = 5.0


class _ReplicaThread(threading.Thread):
    """A thread that runs the functions in its queue until it gets None."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"replica-{number}", daemon=True)
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    @override
    def run(self) -> None:
        """Run functions from the queue until None arrives."""
        while (function := self.queue.get()) is not None:
            function()


class ReplicaThreadPool:
    """A pool that runs one function per replica at the same time. Threads are created at the first use.

    `on_error` is called when a function fails, so that functions which wait for that replica end too.
    """

    def __init__(self, *, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._threads: list[_ReplicaThread] = []

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run all functions and return their results. If functions raise exceptions, raise the first of these."""
        results: dict[int, T] = {}
        errors: list[tuple[float, int, BaseException]] = []  # (time, number of the replica, exception)
        done = threading.Semaphore(0)

        def run_function(number: int) -> None:
            try:
                results[number] = functions[number]()
            except BaseException as error:
                errors.append((time.monotonic(), number, error))
                self._on_error()
            finally:
                done.release()

        while len(self._threads) < len(functions) - 1:
            self._threads.append(_ReplicaThread(len(self._threads) + 1))
        for number, thread in enumerate(self._threads[: len(functions) - 1], 1):
            thread.queue.put(lambda number=number: run_function(number))  # type: ignore[misc]
        run_function(0)
        self._wait_for_all(len(functions), done, errors)
        if errors:
            raise _first_error(errors, len(functions))
        return [results[number] for number in range(len(functions))]

    def close(self) -> None:
        """Stop the threads."""
        for thread in self._threads:
            thread.queue.put(None)
        self._threads = []

    @staticmethod
    def _wait_for_all(count: int, done: threading.Semaphore, errors: list[tuple[float, int, BaseException]]) -> None:
        """Wait for every replica. After an error, wait only PATIENCE_SECONDS, since a stuck thread can't be killed."""
        deadline = None
        for _ in range(count):
            while not done.acquire(timeout=0.2):
                deadline = deadline or (time.monotonic() + PATIENCE_SECONDS if errors else None)
                if deadline is not None and time.monotonic() > deadline:
                    return


def _first_error(errors: list[tuple[float, int, BaseException]], count: int) -> BaseException:
    """Return the first error that is not a `PeerFailed`, with a note on its replica; else the first error."""
    candidates = [entry for entry in errors if not isinstance(entry[2], PeerFailed)] or errors
    _, number, error = min(candidates, key=lambda entry: entry[0])
    error.add_note(f"in replica {number} of {count}")
    return error
