"""A helper process for parallel work: it is forked before there is anything large in memory, and waits.

It must be forked that early: Linux does not let a process fork that has asked for more memory than the machine has,
even if it is never touched, as a model without its numbers does. If no answer comes (the helper died, failed, or
hangs), the caller does the work itself: so nothing depends on the helper but the time it takes.
"""

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.launch.agent.signals import die_with

_PATIENCE, _LEAST_SECONDS = 2.0, 30.0  # times as long as the helper has been there, and at least
_CHUNK, _LENGTH = 1 << 20, 8


class NoAnswer(Exception):
    """The error that tells the caller to do the work itself."""


class Helper:
    """A forked process that calls methods of an object of its own and returns the results, one request at a time."""

    def __init__(self, child: int, line: socket.socket) -> None:
        self._child, self._line, self._began = child, line, time.monotonic()
        self._is_there, self._asked = True, 0

    def begin(self, name: str, *given: Any) -> Callable[[], Any]:
        """Send a request, and return a function that waits for the answer.

        Raises:
            NoAnswer: there is no helper any more. The returned function raises it, too.
        """
        try:
            if not self._is_there:
                raise NoAnswer
            self._asked += 1
            self._line.settimeout(_LEAST_SECONDS)
            _send(self._line, (self._asked, name, given))
        except (OSError, pickle.PicklingError, AttributeError, TypeError):
            self.leave()
            raise NoAnswer from None
        return partial(self._answer, self._asked)

    def leave(self) -> None:
        """End the helper; it gets no more requests."""
        if self._is_there:
            self._is_there = False
            self._line.close()
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._child, 0)

    def _answer(self, asked: int) -> Any:
        if not self._is_there:
            raise NoAnswer
        now, number = time.monotonic(), 0
        until = now + max(_LEAST_SECONDS, _PATIENCE * (now - self._began))
        try:
            while number != asked:  # what nobody waited for comes first
                number, found = _received(self._line, until=until)
            return found
        except (OSError, EOFError):
            self.leave()
            raise NoAnswer from None


@contextmanager
def start_helper(make: Callable[[], object]) -> Iterator[Helper | None]:
    """Start a helper for the object that `make` creates there at the first request; None if it can't be forked."""
    if not can_fork():
        yield None
        return
    here, there = socket.socketpair()
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child == 0:
        here.close()
        _live(make, there, parent)
    there.close()
    helper = Helper(child, here) if child > 0 else None
    try:
        yield helper
    finally:
        if helper is None:
            here.close()
        else:
            helper.leave()


def can_fork() -> bool:
    """Return whether a forked process would work and has a core: no other threads, no device, no process group."""
    return (
        sys.platform == "linux"
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and not dist.is_initialized()
        and not torch.accelerator.is_available()
    )


def _live(make: Callable[[], object], line: socket.socket, parent: int) -> NoReturn:
    try:
        die_with(parent)
        torch.set_num_threads(1)  # the threads of a pool were not forked with it
        made: object = None
        while True:
            number, name, given = _received(line, until=None)
            made = make() if made is None else made
            _send(line, (number, getattr(made, name)(*given)))
    finally:
        os._exit(1)


def _send(line: socket.socket, value: Any) -> None:
    said = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    line.sendall(len(said).to_bytes(_LENGTH, "little") + said)


def _received(line: socket.socket, *, until: float | None) -> Any:
    """Return the next message, pickled by our own process.

    Raises:
        EOFError: nobody is there. TimeoutError: too late.
    """
    length = int.from_bytes(_read(line, _LENGTH, until), "little")
    return pickle.loads(_read(line, length, until))


def _read(line: socket.socket, length: int, until: float | None) -> bytes:
    found = bytearray()
    while len(found) < length:
        line.settimeout(None if until is None else max(1e-3, until - time.monotonic()))
        more = line.recv(min(_CHUNK, length - len(found)))
        if not more:
            raise EOFError
        found += more
    return bytes(found)
