"""The threads of the replicas. The first replica runs in the calling thread, the others in threads that wait for it."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from paceline.comm.rank_threads import PeerFailed

T = TypeVar("T")
PATIENCE_SECONDS = 5.0


class _Member(threading.Thread):
    """Runs what it is handed, until it is handed None."""

    def __init__(self, number: int) -> None:
        super().__init__(name=f"replica-{number}", daemon=True)
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Until the end of the run."""
        while (body := self.work.get()) is not None:
            body()


class ReplicaThreads:
    """Runs one body for each replica at the same time. Threads are made at the first use."""

    def __init__(self, *, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._members: list[_Member] = []

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """What each gave. All have ended then; an exception ends all, and the first one is raised here."""
        results: dict[int, T] = {}
        errors: list[tuple[float, int, BaseException]] = []
        done = threading.Semaphore(0)

        def one(number: int) -> None:
            try:
                results[number] = bodies[number]()
            except BaseException as error:
                errors.append((time.monotonic(), number, error))
                self._on_error()
            finally:
                done.release()

        while len(self._members) < len(bodies) - 1:
            self._members.append(_Member(len(self._members) + 1))
        for number, member in enumerate(self._members[: len(bodies) - 1], 1):
            member.work.put(lambda number=number: one(number))  # type: ignore[misc]
        one(0)
        self._wait(len(bodies), done, errors)
        if errors:
            raise _first(errors, len(bodies))
        return [results[number] for number in range(len(bodies))]

    def close(self) -> None:
        """Let the threads end."""
        for member in self._members:
            member.work.put(None)
        self._members = []

    @staticmethod
    def _wait(count: int, done: threading.Semaphore, errors: list[tuple[float, int, BaseException]]) -> None:
        """For all; after an error not for ever, since a thread that is stuck can't be ended."""
        deadline = None
        for _ in range(count):
            while not done.acquire(timeout=0.2):
                deadline = deadline or (time.monotonic() + PATIENCE_SECONDS if errors else None)
                if deadline is not None and time.monotonic() > deadline:
                    return


def _first(errors: list[tuple[float, int, BaseException]], count: int) -> BaseException:
    """The one that came first, with its replica's number; not one that only says that another left."""
    own = [entry for entry in errors if not isinstance(entry[2], PeerFailed)] or errors
    _, number, error = min(own, key=lambda entry: entry[0])
    error.add_note(f"in replica {number} of {count}")
    return error
