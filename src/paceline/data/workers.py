"""Data workers: the processes of a torch DataLoader whose items are whole microbatches."""

import atexit
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from typing_extensions import override

from paceline.console.formatting import plural
from paceline.data.fetch import Fetcher, MicrobatchRequest, start_function
from paceline.data.fork_with_retry import STARTED_FORK
from paceline.data.source import Source
from paceline.data.worker_serialization import deserialize_microbatch, serialize_microbatch
from paceline.errors import DataError
from paceline.launch.agent.socket_paths import short_temporary_folder
from paceline.launch.failures.oom_detection import explain_data_worker_error, explain_lock_error
from paceline.torch_internals.private_api import mark_iterator_shut_down, stop_data_workers

_open_pools: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The pools of data workers that are closed when the interpreter ends."""


def close_at_exit(pool: Any) -> None:
    """Close this pool of data workers when the interpreter ends, if it is still open."""
    _open_pools.add(pool)


def loader_arguments(source: Source) -> dict[str, Any]:
    """Return the arguments of Paceline's DataLoader; they include the worker settings of the user's DataLoader."""
    user_loader = source.loader
    return {
        "batch_size": None,
        "collate_fn": serialize_microbatch,
        "prefetch_factor": getattr(user_loader, "prefetch_factor", None) or 2,
        "timeout": getattr(user_loader, "timeout", 0),
        "multiprocessing_context": STARTED_FORK,
    }


def worker_generator(seed: int) -> torch.Generator:
    """Return the generator that seeds a DataLoader's workers, so that the rank's own generator is not advanced."""
    return torch.Generator().manual_seed(seed)


class _RequestSampler(Sampler[Any]):
    """A sampler that gives the DataLoader requests for microbatches instead of indices."""

    def __init__(self, requests: Iterable[MicrobatchRequest]) -> None:
        self._requests = requests

    @override
    def __iter__(self) -> Iterator[MicrobatchRequest]:
        return iter(self._requests)


class DataWorkers:
    """The data workers of one loader, if it has any."""

    def __init__(self, *, fetcher: Fetcher, source: Source, pin_memory: bool, seed: int = 0) -> None:
        self._fetcher = fetcher
        self._seed = seed
        self._source = source
        self._pin_memory = pin_memory
        self._iterator: Any = None
        close_at_exit(self)

    def start(self, requests: Iterable[MicrobatchRequest]) -> Iterator[Any] | None:
        """Start workers that fetch these requests in order; return an iterator of the results, None without workers."""
        self.close()
        if not self._source.workers:
            return None
        pins_memory = self._pin_memory or bool(getattr(self._source.loader, "pin_memory", False))
        init_worker = start_function(self._source, user_code_sees_one_worker=False, parent=os.getpid())
        loader = DataLoader(
            self._fetcher,
            num_workers=self._source.workers,
            sampler=_RequestSampler(requests),
            pin_memory=pins_memory,
            worker_init_fn=init_worker,
            generator=worker_generator(self._seed),
            **loader_arguments(self._source),
        )
        with start_workers(self._source.workers):
            self._iterator = iter(loader)
        return guard_worker_death(self._iterator)

    def close(self) -> None:
        """Stop the workers and wait for them; a worker that hangs in the user's code is killed."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            stop_data_workers(iterator)


@contextmanager
def start_workers(workers: int) -> Iterator[None]:
    """Return a context in which data workers are started; if one can't be started, all are stopped.

    Raises:
        DataError: the system has no more processes, open files, memory or space in /dev/shm.
    """
    children_before = set(active_children())
    with suppress(OSError):  # if this fails, the process that needs a socket in this folder reports it
        short_temporary_folder()
    try:
        yield
    except (OSError, MemoryError) as error:
        mark_iterator_shut_down(error)  # else the deletion of the half-built iterator could raise another error
        for process in set(active_children()) - children_before:
            process.kill()
            process.join()
        cause, hint = (
            explain_data_worker_error(str(error))
            or explain_lock_error(error)
            or (
                "a limit on this user's processes or memory: `ulimit -u`, or the limits of the container",
                f"fewer than --data.workers {workers} per rank, or fewer ranks",
            )
        )
        raise DataError(
            f"{plural(workers, 'data worker')} cannot be started: {error}", cause=cause, hint=hint
        ) from error


def guard_worker_death(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the iterator's values; if a data worker dies, raise an error that says so."""
    while True:
        try:
            value = deserialize_microbatch(next(iterator))
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            reason = str(error) if isinstance(error, RuntimeError) else "the data that it had read is lost"
            raise worker_death_error(reason) from error
        yield value


def worker_death_error(reason: str) -> DataError:
    """Return the error for a data worker that died; `reason` says how it died."""
    return DataError(
        f"a data worker died: {reason}",
        cause="it was killed (perhaps for memory), a library crashed, code called exit, or too many files were open",
        hint="--data.workers 0 shows the error in the rank itself",
    )


@atexit.register
def _close_all() -> None:
    """Close all workers before multiprocessing's exit handler would wait for them, because they ignore its SIGTERM."""
    for workers in list(_open_pools):
        workers.close()
