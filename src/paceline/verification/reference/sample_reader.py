"""A naive reader of a batch's samples, without loader, workers or cursor.

It shares two definitions with the loader: the order of samples, and the keys of the random streams. If there are data
workers, it also uses the loader's class for a process that reads data (`DataProcess`).
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

_STREAM_METHODS = ("shard", "set_epoch", "state_dict", "num_shards", "n_shards")


class _ReiterableStream:
    """An iterable that calls a generator function for each iteration."""

    def __init__(self, make_iterator: Callable[[], Any]) -> None:
        self._make_iterator = make_iterator

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make_iterator())


class SampleReader:
    """The samples of a job's training data, read by position.

    `sample_seeds` and `shards` are settings (`data.sample_seeds`, `data.shards`); `batch` is the global batch size.
    """

    def __init__(
        self, *, job: Job, seed: int, drop_last: bool, sample_seeds: str, batch: int = 1, shards: int | None = None
    ) -> None:
        data = job.train_data
        is_dataset = hasattr(data, "__getitem__") or isinstance(data, Iterable)
        if isinstance(data, type) or (callable(data) and not is_dataset):
            make_iterator, data = data, data()
            if isinstance(data, Iterator) and not any(hasattr(data, name) for name in _STREAM_METHODS):
                data = _ReiterableStream(make_iterator)
        self._order, self._collate = job.order, job.collate
        if isinstance(data, DataLoader):
            self._collate = self._collate or data.collate_fn
            if not isinstance(data.dataset, IterableDataset) and self._order is None:
                self._order = _sampler_order(data.sampler)
            data = data.dataset
        self._data = data
        self._seed = seed
        self._drop_last = drop_last
        is_stream = isinstance(data, IterableDataset)
        self.is_indexed = not is_stream and hasattr(data, "__getitem__") and hasattr(data, "__len__")
        # True: the random generators are seeded before each sample, and for a stream also before each collation.
        # False: they are seeded before each microbatch, and for a stream never.
        self._seeds_samples = sample_seeds == "always" or (
            sample_seeds == "auto" and (not self.is_indexed or self._draws_random_numbers())
        )
        self._stream = ShardedStream(data, seed=seed if self._seeds_samples else None, batch=batch, shards=shards)

    @single_process()
    def num_samples(self, epoch: int) -> int | None:
        """Return the number of samples in this epoch; None if it is not known."""
        if not self.is_indexed:
            return None
        has_plain_order = self._order is None or self._order == "sequential"
        return len(self._data) if has_plain_order else len(self._draw_order(epoch))

    @single_process()
    def batch(self, *, epoch: int, position: int, size: int) -> list[int]:
        """Return the indices of the samples of the batch at this position; empty past the end of the epoch."""
        indices = self._indices(epoch, position, position + size)
        return [] if self._drop_last and len(indices) < size else indices

    @single_process()
    def read(self, *, epoch: int, indices: Sequence[int]) -> Any:
        """Return these samples, collated."""
        collate = self._collate or default_collate
        if not self.is_indexed:
            stream = self._stream.read_samples(epoch, max(indices) + 1)
            if self._seeds_samples:
                seed_all(stream_key(self._seed, "microbatch", epoch, indices[0]))
            return collate([stream[i] for i in indices])
        rows = []
        if not self._seeds_samples:
            seed_all(stream_key(self._seed, "microbatch", epoch, indices[0]))
        self._set_dataset_epoch(self._data, epoch)
        for index in indices:
            if self._seeds_samples:
                seed_all(stream_key(self._seed, "sample", epoch, index))
            rows.append(self._data[index])
        return collate(rows)

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        if not self.is_indexed:
            return list(range(start, min(stop, len(self._stream.read_samples(epoch, stop)))))
        total = len(self._data)
        if self._order == "sequential":
            return list(range(total))[start:stop]
        if self._order is None:
            return [int(i) for i in Permutation(num_samples=total, seed=self._seed, epoch=epoch)[start:stop]]
        return self._draw_order(epoch)[start:stop]

    def _draw_order(self, epoch: int) -> list[int]:
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

    def _set_dataset_epoch(self, data: Any, epoch: int) -> None:
        """Set the dataset's epoch; for `Subset`, `ConcatDataset` and similar, that of the inner datasets."""
        parts = getattr(data, "datasets", None)
        inner_datasets = list(parts.values()) if isinstance(parts, dict) else list(parts or [])
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        else:
            for inner in [*inner_datasets, *([data.dataset] if hasattr(data, "dataset") else [])]:
                self._set_dataset_epoch(inner, epoch)

    def _draws_random_numbers(self) -> bool:
        """Return True if reading the first or the middle sample draws from a global generator."""
        for index in {0, len(self._data) // 2}:
            generator_states = _get_generator_states()
            self._data[index]
            if _get_generator_states() != generator_states:
                return True
        return False


class SampleReaderProcess:
    """A `SampleReader` in a separate process.

    The current process must not read the data itself if it forks data workers.
    """

    def __init__(self, *, job: Job, workers: int, **options: Any) -> None:
        source = read_source(job.train_data, collate=job.collate, order=job.order, workers=workers, name="train_data")
        self._process = DataProcess(source, make=lambda: SampleReader(job=job, **options))

    def num_samples(self, epoch: int) -> int | None:
        """Return the same as `SampleReader.num_samples`."""
        count: int | None = self._process.call("num_samples", epoch)
        return count

    def batch(self, *, epoch: int, position: int, size: int) -> list[int]:
        """Return the same as `SampleReader.batch`."""
        indices: list[int] = self._process.call("batch", epoch=epoch, position=position, size=size)
        return indices

    def read(self, *, epoch: int, indices: Sequence[int]) -> Any:
        """Return the same as `SampleReader.read`."""
        return self._process.call("read", epoch=epoch, indices=indices)


def open_sample_reader(*, job: Job, workers: int, **options: Any) -> "SampleReader | SampleReaderProcess":
    """Return a reader of a job's data, in a separate process if there are data workers."""
    return SampleReaderProcess(job=job, workers=workers, **options) if workers else SampleReader(job=job, **options)


class ShardedStream:
    """The samples of a stream in their defined order. Every read starts at the beginning of all shards of the epoch.

    With a `seed`, the random generators are seeded before each sample.
    """

    def __init__(self, data: Any, *, seed: int | None, batch: int, shards: int | None) -> None:
        self._data, self._seed, self._batch = data, seed, batch
        dataset_shards = getattr(data, "num_shards", None) or getattr(data, "n_shards", None)
        self._is_resumable = all(hasattr(data, name) for name in ("shard", "state_dict", "load_state_dict"))
        num_shards = choose_shards(requested=shards, num_real=dataset_shards, global_batch_size=batch)
        self._num_shards = num_shards if self._is_resumable else 1

    def read_samples(self, epoch: int, stop: int) -> list[Any]:
        """Return at least the first `stop` samples of an epoch, or all."""
        shards = [_StreamShard(self, number, epoch) for number in range(self._num_shards)]
        samples: list[Any] = []
        while len(samples) < stop:
            for shard in shards:
                shard.fill(self._batch + 1)
            available, ended = [len(shard.rows) for shard in shards], [shard.is_exhausted for shard in shards]
            counts = samples_per_shard(available=available, ended=ended, size=self._batch) or []
            if not any(counts):
                break
            for shard, count in zip(shards, counts, strict=True):
                samples += shard.rows[:count]
                shard.rows = shard.rows[count:]
        return samples

    def open_shard(self, number: int, epoch: int) -> Any:
        """Return the shard with this number, or the stream itself if it has no shards."""
        SampleReader._set_epoch(self._data, epoch)
        shard = self._data.shard(num_shards=self._num_shards, index=number) if self._is_resumable else self._data
        SampleReader._set_epoch(shard, epoch)
        return shard

    def seed_sample(self, epoch: int, number: int, index: int) -> None:
        """Seed the generators before sample `index` of shard `number` is read."""
        if self._seed is not None:
            seed_all(stream_key(self._seed, "shard", epoch, number, index))


class _StreamShard:
    """A shard that is read from its start. `rows` are the samples that are read but not yet taken."""

    def __init__(self, stream: ShardedStream, number: int, epoch: int) -> None:
        self._stream, self._number, self._epoch = stream, number, epoch
        self._num_read = 0
        self.rows: list[Any] = []
        self.is_exhausted = False
        stream.seed_sample(epoch, number, 0)
        self._iterator = iter(stream.open_shard(number, epoch))

    def fill(self, num_samples: int) -> None:
        while len(self.rows) < num_samples and not self.is_exhausted:
            self._stream.seed_sample(self._epoch, self._number, self._num_read)
            try:
                self.rows.append(next(self._iterator))
                self._num_read += 1
            except StopIteration:
                self.is_exhausted = True


def num_rows(batch: Any) -> int:
    """Return the length of the batch's first tensor; 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else []
    return next((rows for rows in map(num_rows, parts) if rows), 0)


def _sampler_order(sampler: Any) -> Any:
    """Return the order that replaces a standard sampler (None: Paceline's shuffle), or the sampler itself."""
    if isinstance(sampler, SequentialSampler):
        return "sequential"
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return None
    if isinstance(sampler, DistributedSampler):
        return None if sampler.shuffle else "sequential"
    return sampler


def _get_generator_states() -> tuple[str, str, bytes]:
    return str(random.getstate()), str(np.random.get_state(legacy=False)), bytes(torch.get_rng_state().numpy())
