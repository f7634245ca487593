"""Indices to one collated microbatch, in this process or in a data worker."""

import ctypes
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from paceline.errors import DataError, user_line
from paceline.feed.seeds import seed_sample
from paceline.feed.source import Source
from paceline.streams import key, seed_all
from paceline.torch_private import introduce_worker

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One microbatch to fetch."""

    epoch: int
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """An exception on its way out of a data worker, as text: the object itself may not travel."""

    what: str
    where: str
    hint: str = ""
    cause: str = ""


class Fetcher(Dataset[Any]):
    """Reads samples and collates them; an exception comes back as `Trouble`."""

    def __init__(self, *, data: Any, collate: Callable[[list[Any]], Any] | None, seed: int, seed_samples: bool) -> None:
        self._data = data
        self._collate = collate or default_collate
        self._seed = seed
        self._seed_samples = seed_samples

    def __getitem__(self, wanted: Wanted) -> Any:
        if not wanted.indices:
            return None
        samples: list[Any] = []
        try:
            self._read(wanted, samples)
        except Exception as error:
            return trouble(error, doing=f"reading sample {wanted.indices[len(samples)]}")
        try:
            return self._collate(samples)
        except Exception as error:
            return trouble(
                error,
                doing=f"collating samples {_shown(wanted.indices)} of shapes {_shapes(samples)}",
                hint="collate=lambda samples: ... to pad or stack them",
            )

    def _read(self, wanted: Wanted, samples: list[Any]) -> None:
        """Fill `samples`; what is missing in it says which sample failed."""
        if not self._seed_samples:
            seed_all(key(self._seed, "microbatch", wanted.epoch, wanted.indices[0]))
        for index in wanted.indices:
            if self._seed_samples:
                seed_sample(seed=self._seed, epoch=wanted.epoch, index=index)
            samples.append(self._data[index])


def trouble(error: Exception, *, doing: str, hint: str = "") -> Trouble:
    """Say what went wrong and where in the user's code."""
    line = user_line(error)
    where = f"{line}: {line.text}" if line else ""
    return Trouble(what=f"{doing} failed: {type(error).__name__}: {error}", where=where, hint=hint)


def checked(value: Any) -> Any:
    """The microbatch, or the error it carries.

    Raises:
        DataError: the dataset or the collation raised.
    """
    if isinstance(value, Trouble):
        raise DataError(value.what, where=value.where, cause=value.cause, hint=value.hint)
    return value


def worker_init(source: Source, *, alone: bool) -> Callable[[int], None]:
    """A data worker outlives signals (its rank decides) and never outlives its rank.

    The user's own `worker_init_fn` then finds its dataset in `get_worker_info()`, and no other worker if `alone`.
    """
    then = source.loader.worker_init_fn if source.loader is not None else None

    def start(number: int) -> None:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        torch.set_num_threads(1)
        introduce_worker(source.data, alone=alone)
        if then is not None:
            then(number)

    return start


def _shown(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:4])) + (", ..." if len(indices) > 4 else "")


def _shapes(samples: Sequence[Any]) -> str:
    shapes = [_shape(sample) for sample in samples]
    return " and ".join(list(dict.fromkeys(shapes))[:3])


def _shape(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {_shape(value)}" for name, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_shape(part) for part in sample) + ")"
    shape = getattr(sample, "shape", None)
    return str(tuple(shape)) if shape is not None else type(sample).__name__
