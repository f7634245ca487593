"""Collation of a stream's samples into microbatches: in the rank, or, with data workers, in a separate process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from paceline.data.fetch import raise_worker_error, worker_error
from paceline.data.reader_process import DataProcess
from paceline.data.source import Source
from paceline.data.stream.shard_workers import restore_tensors, tensors_by_value
from paceline.data.types import ReplicaMicrobatch
from paceline.torch_internals.rng import seed_all


class Collator:
    """The collator of one stream. With data workers, a user-defined `collate=` runs in a separate process."""

    def __init__(self, source: Source) -> None:
        self._collation = _Collation(collate=source.collate or default_collate)
        self._process: DataProcess | None = None
        if source.workers and self._collation.collate is not default_collate:
            self._process = DataProcess(source, make=lambda: self._collation)

    def collate_microbatch(
        self, samples: list[Any], *, index: int, start: int, seed: int | None = None
    ) -> ReplicaMicrobatch:
        """Return a microbatch of `samples`, whose first one has position `start` in the epoch.

        Raises:
            DataError: the collate function raised an exception.
        """
        if self._process is None:
            data = self._collation.run(samples, seed)
        else:
            data = restore_tensors(self._process.call("run_serialized", tensors_by_value(samples), seed))
        indices = tuple(range(start, start + len(samples)))
        return ReplicaMicrobatch(index=index, num_samples=len(samples), data=raise_worker_error(data), indices=indices)

    def close(self) -> None:
        """End the collation process."""
        if self._process is not None:
            self._process.close()


@dataclass(frozen=True)
class _Collation:
    """A collate function that also runs in a separate process, where samples and result are serialized."""

    collate: Callable[[list[Any]], Any]

    def run(self, samples: list[Any], seed: int | None) -> Any:
        if seed is not None:
            seed_all(seed)
        try:
            return self.collate(samples)
        except Exception as error:
            return worker_error(error, doing="collating samples of a stream", hint="collate=lambda samples: ...")

    def run_serialized(self, samples: Any, seed: int | None) -> Any:
        return tensors_by_value(self.run(restore_tensors(samples), seed))
