"""Data workers: torch's own DataLoader, asked for whole microbatches."""

import atexit
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from paceline.console.formatting import plural
from paceline.data.fetch import Fetcher, MicrobatchRequest, worker_init
from paceline.data.source import Source
from paceline.data.started_fork import STARTED_FORK
from paceline.data.worker_serialization import pack, unpack
from paceline.errors import DataError
from paceline.launch.agent.socket_paths import short_temporary_folder
from paceline.launch.failures.oom_detection import explain_lack
from paceline.torch_internals.private_api import abandon_data_workers, stop_data_workers

_open: "weakref.WeakSet[Any]" = weakref.WeakSet()


def closed_at_exit(pool: Any) -> None:
    """Stop this one's data workers when the interpreter ends, if nobody has."""
    _open.add(pool)


def kept_settings(source: Source) -> dict[str, Any]:
    """What a user's DataLoader says about its workers, for ours."""
    given = source.loader
    return {
        "batch_size": None,
        "collate_fn": pack,
        "prefetch_factor": getattr(given, "prefetch_factor", None) or 2,
        "timeout": getattr(given, "timeout", 0),
        "multiprocessing_context": STARTED_FORK,
    }


def worker_seeds(seed: int) -> torch.Generator:
    """Return the generator from which a DataLoader draws its workers' seeds: else it moves the rank's own."""
    return torch.Generator().manual_seed(seed)


class _Asked(Sampler[Any]):
    def __init__(self, wanted: Iterable[MicrobatchRequest]) -> None:
        self._wanted = wanted

    def __iter__(self) -> Iterator[MicrobatchRequest]:
        return iter(self._wanted)


class Workers:
    """The workers of one feed, none if it asks for none."""

    def __init__(self, *, fetcher: Fetcher, source: Source, pin_memory: bool, seed: int = 0) -> None:
        self._fetcher = fetcher
        self._seed = seed
        self._source = source
        self._pin_memory = pin_memory
        self._iterator: Any = None
        closed_at_exit(self)

    def start(self, wanted: Iterable[MicrobatchRequest]) -> Iterator[Any] | None:
        """Fetch ahead in this order, and nothing else any more; None where nothing is fetched ahead."""
        self.close()
        if not self._source.workers:
            return None
        pinned = self._pin_memory or bool(getattr(self._source.loader, "pin_memory", False))
        start = worker_init(self._source, alone=False, parent=os.getpid())
        loader = DataLoader(
            self._fetcher,
            num_workers=self._source.workers,
            sampler=_Asked(wanted),
            pin_memory=pinned,
            worker_init_fn=start,
            generator=worker_seeds(self._seed),
            **kept_settings(self._source),
        )
        with start_workers(self._source.workers):
            self._iterator = iter(loader)
        return guard_worker_death(self._iterator)

    def close(self) -> None:
        """Stop them, and wait until they are gone; one that is stuck in the user's code is killed."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            stop_data_workers(iterator)


@contextmanager
def start_workers(workers: int) -> Iterator[None]:
    """Start data workers inside: where not all can be started, none is left.

    Raises:
        DataError: the system gives no more processes, open files or memory.
    """
    before = set(active_children())
    with suppress(OSError):  # whoever needs a socket says so
        short_temporary_folder()
    try:
        yield
    except (OSError, MemoryError) as error:
        abandon_data_workers(error)
        for process in set(active_children()) - before:
            process.kill()
            process.join()
        cause, hint = explain_lack(str(error)) or (
            "the system gives this user no more processes or memory: `ulimit -u`, or the limits of the container",
            f"a smaller number than --data.workers {workers} of each rank, or fewer ranks",
        )
        raise DataError(
            f"{plural(workers, 'data worker')} cannot be started: {error}", cause=cause, hint=hint
        ) from error


def guard_worker_death(iterator: Iterator[Any]) -> Iterator[Any]:
    """The same values; a data worker that dies is named."""
    while True:
        try:
            value = unpack(next(iterator))
        except StopIteration:
            return
        except (RuntimeError, OSError, EOFError) as error:
            said = str(error) if isinstance(error, RuntimeError) else "what it had read went with it"
            raise worker_died(said) from error
        yield value


def worker_died(said: str) -> DataError:
    """Return the error of a data worker that is gone, with what is known of its end."""
    return DataError(
        f"a data worker died: {said}",
        cause="it was killed, perhaps for memory, a library crashed, its code called exit, or too many files were open",
        hint="--data.workers 0 shows the error in the rank itself",
    )


@atexit.register
def _close_all() -> None:
    """Before multiprocessing's own way out, which sends SIGTERM and waits: data workers ignore SIGTERM."""
    for workers in list(_open):
        workers.close()
