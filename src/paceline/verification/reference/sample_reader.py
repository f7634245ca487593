"""A naive reader of a batch's samples, without loader, workers or cursor.

Only the definitions are shared with the loader: the order of samples, and the keys of the random streams.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from paceline.data.order.permutation import Permutation
from paceline.data.order.virtual_shards import choose_shards, samples_per_shard
from paceline.data.reader_process import DataProcess
from paceline.data.source import read_source
from paceline.job import Job
from paceline.torch_internals.rng import preserve_rng, seed_all, stream_key
from paceline.verification.reference.process_group_isolation import single_process

_STREAMS = ("shard", "set_epoch", "state_dict", "num_shards", "n_shards")


class _Anew:
    """An iterable that calls a generator function each time it is read."""

    def __init__(self, made_by: Callable[[], Any]) -> None:
        self._made_by = made_by

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made_by())


class SampleReader:
    """The training data of a job, by position."""

    def __init__(
        self, *, job: Job, seed: int, drop_last: bool, sample_seeds: str, batch: int = 1, shards: int | None = None
    ) -> None:
        data = job.train_data
        made = hasattr(data, "__getitem__") or isinstance(data, Iterable)
        if isinstance(data, type) or (callable(data) and not made):
            made_by, data = data, data()
            if isinstance(data, Iterator) and not any(hasattr(data, name) for name in _STREAMS):
                data = _Anew(made_by)
        self._order, self._collate = job.order, job.collate
        if isinstance(data, DataLoader):
            self._collate = self._collate or data.collate_fn
            if not isinstance(data.dataset, IterableDataset) and self._order is None:
                self._order = _order_of(data.sampler)
            data = data.dataset
        self._data = data
        self._seed = seed
        self._drop_last = drop_last
        is_stream = isinstance(data, IterableDataset)
        self.is_indexed = not is_stream and hasattr(data, "__getitem__") and hasattr(data, "__len__")
        self._seeded = sample_seeds == "always" or (sample_seeds == "auto" and (not self.is_indexed or self._draws()))
        self._stream = Sharded(data, seed=seed if self._seeded else None, batch=batch, shards=shards)

    @single_process()
    def num_samples(self, epoch: int) -> int | None:
        """Return the samples in this epoch, if that can be known."""
        if not self.is_indexed:
            return None
        plain = self._order is None or self._order == "sequential"
        return len(self._data) if plain else len(self._drawn(epoch))

    @single_process()
    def batch(self, *, epoch: int, position: int, size: int) -> list[int]:
        """Return the samples of the batch at this position; none past the end of the epoch."""
        found = self._indices(epoch, position, position + size)
        return [] if self._drop_last and len(found) < size else found

    @single_process()
    def read(self, *, epoch: int, part: Sequence[int]) -> Any:
        """Return these samples, collated."""
        collate = self._collate or default_collate
        if not self.is_indexed:
            stream = self._stream.samples(epoch, max(part) + 1)
            if self._seeded:
                seed_all(stream_key(self._seed, "microbatch", epoch, part[0]))
            return collate([stream[i] for i in part])
        rows = []
        if not self._seeded:
            seed_all(stream_key(self._seed, "microbatch", epoch, part[0]))
        self._tell(self._data, epoch)
        for index in part:
            if self._seeded:
                seed_all(stream_key(self._seed, "sample", epoch, index))
            rows.append(self._data[index])
        return collate(rows)

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        if not self.is_indexed:
            return list(range(start, min(stop, len(self._stream.samples(epoch, stop)))))
        total = len(self._data)
        if self._order == "sequential":
            return list(range(total))[start:stop]
        if self._order is None:
            return [int(i) for i in Permutation(num_samples=total, seed=self._seed, epoch=epoch)[start:stop]]
        return self._drawn(epoch)[start:stop]

    def _drawn(self, epoch: int) -> list[int]:
        with preserve_rng():
            seed_all(stream_key(self._seed, "order", epoch))
            self._set_epoch(self._order, epoch)
            if callable(self._order):
                return [int(i) for i in self._order(len(self._data), epoch, self._seed)]
            return [int(i) for i in self._order]

    @staticmethod
    def _set_epoch(holder: Any, epoch: int) -> None:
        if hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)

    def _tell(self, data: Any, epoch: int) -> None:
        """Set the dataset's epoch; for `Subset`, `ConcatDataset` and similar, that of the inner datasets."""
        parts = getattr(data, "datasets", None)
        inside = list(parts.values()) if isinstance(parts, dict) else list(parts or [])
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        else:
            for part in [*inside, *([data.dataset] if hasattr(data, "dataset") else [])]:
                self._tell(part, epoch)

    def _draws(self) -> bool:
        """Return True if reading the first or the middle sample moves a global generator."""
        for index in {0, len(self._data) // 2}:
            before = _generators()
            self._data[index]
            if _generators() != before:
                return True
        return False


class ReadingApart:
    """A `SampleReader` in its own process: if data workers are forked, the forking process must not read the data."""

    def __init__(self, *, job: Job, workers: int, **how: Any) -> None:
        source = read_source(job.train_data, collate=job.collate, order=job.order, workers=workers, name="train_data")
        self._process = DataProcess(source, make=lambda: SampleReader(job=job, **how))

    def num_samples(self, epoch: int) -> int | None:
        """Return the same as `SampleReader.num_samples`."""
        found: int | None = self._process.ask("num_samples", epoch)
        return found

    def batch(self, *, epoch: int, position: int, size: int) -> list[int]:
        """Return the same as `SampleReader.batch`."""
        found: list[int] = self._process.ask("batch", epoch=epoch, position=position, size=size)
        return found

    def read(self, *, epoch: int, part: Sequence[int]) -> Any:
        """Return the same as `SampleReader.read`."""
        return self._process.ask("read", epoch=epoch, part=part)


def reading_of(*, job: Job, workers: int, **how: Any) -> "SampleReader | ReadingApart":
    """Return a reader of a job's data, in a process of its own if there are data workers."""
    return ReadingApart(job=job, workers=workers, **how) if workers else SampleReader(job=job, **how)


class Sharded:
    """The order of a stream by its definition: all batches since the epoch's start, from shards read from theirs."""

    def __init__(self, data: Any, *, seed: int | None, batch: int, shards: int | None) -> None:
        self._data, self._seed, self._batch = data, seed, batch
        real = getattr(data, "num_shards", None) or getattr(data, "n_shards", None)
        self._keeps_place = all(hasattr(data, name) for name in ("shard", "state_dict", "load_state_dict"))
        chosen = choose_shards(asked=shards, real=real, global_batch_size=batch)
        self._shards = chosen if self._keeps_place else 1

    def samples(self, epoch: int, stop: int) -> list[Any]:
        """Return at least the first `stop` samples of an epoch, or all."""
        parts = [_Part(self, number, epoch) for number in range(self._shards)]
        found: list[Any] = []
        while len(found) < stop:
            for part in parts:
                part.fill(self._batch + 1)
            have, ended = [len(part.rows) for part in parts], [part.ended for part in parts]
            takes = samples_per_shard(have=have, ended=ended, size=self._batch) or []
            if not any(takes):
                break
            for part, count in zip(parts, takes, strict=True):
                found += part.rows[:count]
                part.rows = part.rows[count:]
        return found

    def open(self, number: int, epoch: int) -> Any:
        """Return one shard, or the stream itself if it is not sharded."""
        SampleReader._set_epoch(self._data, epoch)
        part = self._data.shard(num_shards=self._shards, index=number) if self._keeps_place else self._data
        SampleReader._set_epoch(part, epoch)
        return part

    def seed(self, epoch: int, number: int, index: int) -> None:
        """Seed the generators before a sample is read."""
        if self._seed is not None:
            seed_all(stream_key(self._seed, "shard", epoch, number, index))


class _Part:
    """A shard that is read from its start."""

    def __init__(self, stream: Sharded, number: int, epoch: int) -> None:
        self._stream, self._number, self._epoch = stream, number, epoch
        self._read = 0
        self.rows: list[Any] = []
        self.ended = False
        stream.seed(epoch, number, 0)
        self._iterator = iter(stream.open(number, epoch))

    def fill(self, samples: int) -> None:
        while len(self.rows) < samples and not self.ended:
            self._stream.seed(self._epoch, self._number, self._read)
            try:
                self.rows.append(next(self._iterator))
                self._read += 1
            except StopIteration:
                self.ended = True


def num_rows(batch: Any) -> int:
    """Return the length of the batch's first tensor; 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else []
    return next((rows for rows in map(num_rows, parts) if rows), 0)


def _order_of(sampler: Any) -> Any:
    if isinstance(sampler, SequentialSampler):
        return "sequential"
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return None
    if isinstance(sampler, DistributedSampler):
        return None if sampler.shuffle else "sequential"
    return sampler


def _generators() -> tuple[str, str, bytes]:
    return str(random.getstate()), str(np.random.get_state(legacy=False)), bytes(torch.get_rng_state().numpy())
