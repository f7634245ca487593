"""A thread for the part of a save that the training does not wait for."""

import queue
import threading
from collections.abc import Callable


class BackgroundThread:
    """A thread that calls functions in the order in which they were added.

    The training continues as long as these functions are in calls that release Python's lock, such as the copy of a
    file. An error of one function cancels the functions after it, and is raised by the next `wait`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._functions: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, after those that were added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._functions.put(function)

    def wait(self) -> None:
        """Wait until the thread has nothing left to do.

        Raises:
            BaseException: the error of the first function that failed since the last call.
        """
        self._functions.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def is_idle(self, *, seconds: float) -> bool:
        """Return whether the thread has nothing left to do, at the latest after `seconds`."""
        functions = self._functions
        with functions.all_tasks_done:
            return functions.all_tasks_done.wait_for(lambda: not functions.unfinished_tasks, timeout=seconds)

    def close(self) -> None:
        """Wait for the functions that were added, and end the thread. Errors are dropped."""
        if self._thread is not None:
            self._functions.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (function := self._functions.get()) is not None:
            try:
                if self._error is None:
                    function()
            except BaseException as error:
                self._error = error
            finally:
                self._functions.task_done()
        self._functions.task_done()
