"""A wait of a member between two attempts, such as for a lost head, that a stop signal ends in order."""

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.launch.agent.stop_requests import StopRequests


class StoppedWaitError(Exception):
    """This process was asked to stop while it waited."""


@contextmanager
def stop_ends_wait() -> Iterator[None]:
    """Return a context that the first stop signal leaves with an exception.

    Without it, the signal would kill the process. Agents that run inside have their own handlers.

    Raises:
        StoppedWaitError: a stop signal has come.
    """
    requests = StopRequests()
    requests.on_request = _end_wait
    with requests.listening():
        yield


def _end_wait(_: int) -> None:
    raise StoppedWaitError
