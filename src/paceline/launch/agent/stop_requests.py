"""The stop signals that the command receives, from its first attempt to its last."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.launch.agent.signals import IGNORED_WHEN_REPEATED, active_stop_signals, is_main_thread


class StopRequests:
    """The number of stop requests so far, and what to do when another one arrives.

    `on_request(number)` is called with the number of the signal. A supervisor sets it while its attempt runs. A signal
    between two attempts is only counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_interrupted = False
        """Whether the last request was Ctrl-C."""
        self.on_request: Callable[[int], None] | None = None

    def is_asked(self) -> bool:
        """Return whether there was a stop request."""
        return self.count > 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Return a context in which this object handles the stop signals of this process.

        Outside the main thread, no handlers are installed, because Python runs them only in the main thread.
        """
        numbers = active_stop_signals() if is_main_thread() else []
        previous_handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, self._handler_to_restore(number, signal.SIG_DFL if handler is None else handler))

    def _on_signal(self, number: int, _: object) -> None:
        if self.count and number in IGNORED_WHEN_REPEATED:
            return
        self.count += 1
        self.is_interrupted = number == signal.SIGINT
        if self.on_request is not None:
            self.on_request(number)

    def _handler_to_restore(self, number: int, previous_handler: Any) -> Any:
        """Return the handler to restore, or SIG_IGN if a late repeat of the signal could still kill the process."""
        is_late = self.count and number in IGNORED_WHEN_REPEATED and previous_handler == signal.SIG_DFL
        return signal.SIG_IGN if is_late else previous_handler
