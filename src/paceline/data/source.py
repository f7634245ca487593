"""The user's data in one form: a map-style or iterable dataset, an order, and the settings for reading it."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.console.formatting import plural
from paceline.data.order.batches import Batch, next_batch
from paceline.data.order.cursor import Cursor
from paceline.data.order.permutation import Permutation, Positions
from paceline.errors import DataError, JobError, UsageError, raise_all, shorten_text, user_line
from paceline.job_field_checks import integer_indices, unfit_data
from paceline.torch_internals.rng import preserve_rng, seed_all, stream_key

Collate = Callable[[list[Any]], Any]


_ORDER_HINT = "order=lambda num_samples, epoch, seed: [indices ...]"
# An iterator with one of these methods is a dataset, not only the iterator of a generator function.
_DATASET_METHODS = ("shard", "set_epoch", "state_dict", "num_shards", "n_shards")


@dataclass(frozen=True, kw_only=True)
class RegeneratedIterable:
    """An iterable over a generator function, which is called again for each pass."""

    make: Callable[[], Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


@dataclass(frozen=True, kw_only=True)
class Source:
    """The data and the settings for reading it.

    `loader` is the user's DataLoader, if the data was given as one. `notes` are lines for the banner.
    """

    data: Any
    collate: Collate | None = None
    order: Any = None
    workers: int = 0
    loader: DataLoader[Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_indexed(self) -> bool:
        """Return whether any sample can be read by its index."""
        return is_indexed(self.data)

    @property
    def order_source(self) -> str:
        """The origin of the order, as text for messages."""
        is_from_loader = self.loader is not None and self.order is self.loader.sampler
        return "the DataLoader's sampler" if is_from_loader else "order="


def is_indexed(data: Any) -> bool:
    """Return whether samples can be read by index. `IterableDataset` has a `__getitem__` too, but it always raises."""
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


class DatasetCache:
    """A cache of the datasets that functions return. A map-style dataset is created once, an iterable for each pass."""

    def __init__(self) -> None:
        self._datasets: dict[int, tuple[Any, Any]] = {}  # by `id` of a function: the function and its dataset

    def get(self, data: Any) -> Any:
        """Return the dataset: `data` itself, or the result of calling `data` if it is a function or a class."""
        if not _is_factory(data):
            return data
        if id(data) in self._datasets:
            return self._datasets[id(data)][1]
        dataset = data()
        if isinstance(dataset, Iterator) and not any(hasattr(dataset, name) for name in _DATASET_METHODS):
            return RegeneratedIterable(make=data)
        if is_indexed(dataset.dataset if isinstance(dataset, DataLoader) else dataset):
            self._datasets[id(data)] = data, dataset
        return dataset


def _is_factory(data: Any) -> bool:
    """Return whether `data` is a function or a class that must be called to get the dataset."""
    is_data = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    return isinstance(data, type) or (callable(data) and not is_data)


def read_source(
    data: Any, *, collate: Collate | None, order: Any, workers: int, name: str, cache: DatasetCache | None = None
) -> Source:
    """Return `data` as a `Source`, without reading it; a `Source` is returned unchanged.

    Raises:
        JobError: `data` can be neither indexed nor iterated.
    """
    if isinstance(data, Source):
        return data
    data = (cache or DatasetCache()).get(data)
    if isinstance(data, DataLoader):
        return _from_loader(data, collate=collate, order=order, workers=workers, name=name)
    if collate is None:
        raise_all(list(unfit_data(data, name=name)))
    source = Source(data=data, collate=collate, order=order, workers=workers)
    if not source.is_indexed and not isinstance(data, Iterable):
        raise JobError(
            f"{name} is a {type(data).__name__}, which can be neither indexed nor iterated.",
            hint="give an object with __len__ and __getitem__, an iterable, or a function that returns one",
        )
    return source


def _from_loader(loader: DataLoader[Any], *, collate: Collate | None, order: Any, workers: int, name: str) -> Source:
    """Return a source with the settings of the user's DataLoader, except its batch size."""
    _check_loader(loader, name)
    notes = ["the DataLoader's own settings are kept; global_batch_size sets the batches"]
    if loader.drop_last and name == "train_data":
        notes.append("the DataLoader's drop_last is ignored: use --data.drop_last true")
    context = loader.multiprocessing_context
    method = context.get_start_method() if hasattr(context, "get_start_method") else context
    if method not in (None, "fork"):
        notes.append(f"the DataLoader's multiprocessing_context {method} is ignored: data workers are forked")
    if order is None and is_indexed(loader.dataset):
        order, note = _order_from_sampler(loader.sampler)
        notes += [note] if note else []
    return Source(
        data=loader.dataset,
        collate=collate or loader.collate_fn,
        order=order,
        workers=workers or loader.num_workers,
        loader=loader,
        notes=tuple(notes),
    )


def _check_loader(loader: DataLoader[Any], name: str) -> None:
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise JobError(
            f"the DataLoader forms batches with its own {type(loader.batch_sampler).__name__}.",
            cause="which samples form a batch must be known for any number of ranks",
            hint="order=lambda num_samples, epoch, seed: [indices ...]",
        )
    if loader.batch_size is None:
        raise JobError(
            f"the DataLoader of {name} has batch_size=None: its dataset returns whole batches.",
            cause="batches are split into microbatches for any number of ranks, which needs single samples",
            hint=f"{name}=a dataset of single samples, and collate= to build a batch from them",
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise JobError(
            f"{name} is a {type(loader).__name__}, a DataLoader with its own __iter__.",
            cause="the run reads and distributes the samples, so that they are the same on any number of ranks",
            hint=f"{name}=loader.dataset, with collate=loader.collate_fn",
        )


def _order_from_sampler(sampler: Any) -> tuple[Any, str]:
    """Return the order (None for a shuffle by Paceline's seed) and a note for the banner."""
    if isinstance(sampler, SequentialSampler):
        return "sequential", ""
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        has_generator = sampler.generator is not None
        return (
            None,
            "the DataLoader's generator is not used: the seed sets the order of samples" if has_generator else "",
        )
    if isinstance(sampler, DistributedSampler):
        note = "the DistributedSampler is replaced: it repeats samples to even out ranks"
        return (None if sampler.shuffle else "sequential"), note
    return sampler, ""


def refuse_no_batch(num_samples: int, *, batch: int) -> None:
    """Raise an error if an epoch has no full batch, because `data.drop_last` would drop the epoch's only batch.

    Raises:
        UsageError: an epoch has fewer samples than a global batch.
    """
    if num_samples < batch:
        raise UsageError(
            f"data.drop_last leaves nothing to train on: an epoch has {plural(num_samples, 'sample')}, but a global "
            f"batch has {batch}.",
            hint=f"--data.drop_last false, or --train.global_batch_size {num_samples}",
        )


class SampleOrder:
    """The map from positions of an epoch to samples: a pure function of (seed, epoch, position)."""

    def __init__(self, *, order: Any, num_samples: int, seed: int) -> None:
        self._order = order
        self._num_samples = num_samples
        self._seed = seed
        self._epochs: dict[int, Permutation | Positions] = {}

    @property
    def is_user_defined(self) -> bool:
        """Return whether the order is user-defined."""
        return self._order is not None and not (isinstance(self._order, str) and self._order == "sequential")

    def checksum_or_name(self, epoch: int) -> str:
        """Return the checksum of a user-defined order, or the name of another one ("shuffled", "sequential")."""
        if not self.is_user_defined:
            return self._order or "shuffled"
        return f"{zlib.crc32(np.ascontiguousarray(self._indices_of_epoch(epoch)).tobytes()):08x}"

    def next_batch(self, cursor: Cursor, *, global_batch_size: int, micro_batch_size: int, drop_last: bool) -> Batch:
        """Return the batch at `cursor`. A user-defined order may have a different length in each epoch.

        Raises:
            UsageError: short batches are dropped, and an epoch has no full batch.
        """
        num_left = self.size(cursor.epoch) - cursor.position
        if num_left <= 0 or (drop_last and num_left < global_batch_size):
            cursor = Cursor(epoch=cursor.epoch + 1, samples=cursor.samples, step=cursor.step)
        total = self.size(cursor.epoch)
        if drop_last:
            refuse_no_batch(total, batch=global_batch_size)
        return next_batch(
            cursor,
            num_samples=total,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            drop_last=drop_last,
        )

    def size(self, epoch: int) -> int:
        """Return the number of samples in this epoch."""
        return len(self._indices_of_epoch(epoch))

    def indices_at(self, *, epoch: int, start: int, stop: int) -> tuple[int, ...]:
        """Return the sample indices at these positions."""
        return tuple(self._indices_of_epoch(epoch)[start:stop].tolist())

    def _indices_of_epoch(self, epoch: int) -> "Permutation | Positions":
        if epoch not in self._epochs:
            self._epochs = {e: indices for e, indices in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = self._compute_epoch(epoch)
        return self._epochs[epoch]

    def _compute_epoch(self, epoch: int) -> "Permutation | Positions":
        if self._order is None:
            return Permutation(num_samples=self._num_samples, seed=self._seed, epoch=epoch)
        if self._order == "sequential":
            return np.arange(self._num_samples, dtype=np.int64)
        indices = integer_indices(self._user_indices(epoch))
        if indices.ndim != 1:
            raise JobError(f"order= returned lists of indices (batches?) at epoch {epoch}.", hint=_ORDER_HINT)
        if len(indices) == 0 or indices.min() < 0 or indices.max() >= self._num_samples:
            raise DataError(
                f"order= returned no indices, or indices outside 0..{self._num_samples - 1}, at epoch {epoch}.",
                hint=_ORDER_HINT,
            )
        return indices

    def _user_indices(self, epoch: int) -> Sequence[Any]:
        """Return the sample indices of an epoch in the user's order.

        Raises:
            JobError: `order=` is not an order, or computing it raises an exception.
        """
        order = self._order
        if isinstance(order, str | bytes) or not (callable(order) or isinstance(order, Iterable)):
            raise JobError(
                f"order={shorten_text(repr(order), lines=1, width=40)} is not an order of samples.",
                hint=f'order="sequential", a torch Sampler, or {_ORDER_HINT}',
            )
        try:
            return self._call_user_order(epoch)
        except Exception as error:
            line = user_line(error)
            raise JobError(
                f"order= failed for epoch {epoch}: {type(error).__name__}: {shorten_text(str(error))}",
                where=f"{line}: {line.text}" if line else "",
                hint=_ORDER_HINT,
            ) from error

    def _call_user_order(self, epoch: int) -> Sequence[Any]:
        with preserve_rng():
            seed_all(stream_key(self._seed, "order", epoch))
            if isinstance(self._order, Sampler) or not callable(self._order):
                if hasattr(self._order, "set_epoch"):
                    self._order.set_epoch(epoch)
                return list(self._order)
            return list(self._order(self._num_samples, epoch, self._seed))
