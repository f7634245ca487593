"""A separate process that uses the dataset in place of a rank, if the rank has data workers.

A file handle that a dataset opens at its first read is shared with every process that is forked later. Two such
processes would seek and read at the same time, and get wrong records. Therefore a rank with data workers never uses the
dataset itself, not even for `len()`. It forks a separate process. To the code of a map-style dataset, this process
looks like a data worker. A rank without data workers forks nothing and reads the data itself.
"""

import os
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from paceline.data.fetch import follow_rank, raise_worker_error, start_function, worker_error
from paceline.data.fork_with_retry import STARTED_FORK
from paceline.data.source import Source
from paceline.data.worker_serialization import deserialize
from paceline.data.workers import close_at_exit, start_workers, worker_death_error
from paceline.errors import DataError, PacelineError
from paceline.torch_internals.private_api import hide_worker_info, set_up_data_worker
from paceline.torch_internals.rng import stream_key

Result = TypeVar("Result")


def read_in_process(source: Source, read: Callable[[], Result], *, seed: int = 0) -> Result:
    """Return `read()`, which runs in a separate process if the source has data workers.

    Raises:
        PacelineError: raised by `read`.
        DataError: in a separate process, `read` raised another exception, or the process died. Without data workers,
            an exception of `read` is not converted.
    """
    if not source.workers:
        return read()
    process = DataProcess(source, make=lambda: _Reader(read=read), seed=seed)
    try:
        result: Result = process.call("read")
        return result
    finally:
        process.close()


@dataclass(frozen=True)
class _Reader:
    """An object whose method `read` a `DataProcess` can call."""

    read: Callable[[], Any]


class DataProcess:
    """A forked process that calls methods of one object and returns the results. `make` builds the object there."""

    def __init__(self, source: Source, *, make: Callable[[], Any], seed: int = 0) -> None:
        with start_workers(1):
            parent_pipe, child_pipe = STARTED_FORK.Pipe()
            arguments = (source, make, stream_key(seed, "apart") >> 16, os.getpid(), parent_pipe, child_pipe)
            process = STARTED_FORK.Process(target=_serve_calls, args=arguments, daemon=True)
            process.start()
        child_pipe.close()
        self._process: BaseProcess = process
        self._pipe: Connection = parent_pipe
        self._finalizer = weakref.finalize(self, _stop_process, process, parent_pipe)
        close_at_exit(self)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object in the process and return the result.

        Raises:
            PacelineError, DataError: the method raised an exception, or the process has died.
        """
        try:
            self._pipe.send_bytes(pickle.dumps((method, args, kwargs), protocol=5))
            wait([self._pipe, self._process.sentinel])
            if not self._pipe.poll():
                raise EOFError
            is_result, value = deserialize(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            raise worker_death_error(f"its exit code is {self._process.exitcode}") from error
        if is_result:
            return value
        raise value

    def close(self) -> None:
        """End the process."""
        self._finalizer()


def _stop_process(process: BaseProcess, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()


def _serve_calls(
    source: Source, make: Callable[[], Any], seed: int, parent: int, parent_pipe: Connection, pipe: Connection
) -> None:
    """Run the requested calls in the forked process until the pipe is closed."""
    follow_rank(parent)
    parent_pipe.close()
    set_up_data_worker(source.data, seed=seed)
    target: Any = None
    while True:
        try:
            method, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if target is None:
                start_function(source, user_code_sees_one_worker=True, parent=parent)(0)
                if not source.is_indexed:
                    hide_worker_info()
                target = make()
            reply = pickle.dumps((True, getattr(target, method)(*args, **kwargs)), protocol=5)
        except Exception as error:
            reply = pickle.dumps((False, _picklable_error(error)), protocol=5)
        pipe.send_bytes(reply)


def _picklable_error(error: Exception) -> PacelineError:
    """Return an error that can be pickled: a `PacelineError` itself, any other error as text with the user's line."""
    if isinstance(error, PacelineError):
        return error
    try:
        raise_worker_error(worker_error(error, doing="reading data"))
    except DataError as data_error:
        return data_error
    raise AssertionError
