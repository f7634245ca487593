"""The samples of a batch, read as naively as can be: no feed, no workers, no cursor.

Only the definitions are shared with the feed: the order of samples, and the keys of the random streams.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, default_collate

from paceline.job import Job
from paceline.order.permute import Permutation
from paceline.streams import key, preserved, seed_all


class Reading:
    """A job's training data, by position."""

    def __init__(self, *, job: Job, seed: int, drop_last: bool, sample_seeds: str) -> None:
        data = job.train_data
        if callable(data) and not hasattr(data, "__getitem__") and not isinstance(data, Iterable):
            data = data()
        self._order, self._collate = job.order, job.collate
        if isinstance(data, DataLoader):
            self._collate = self._collate or data.collate_fn
            self._order = _order_of(data.sampler) if self._order is None else self._order
            data = data.dataset
        self._data = data
        self._seed = seed
        self._drop_last = drop_last
        self.is_indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        self._seeded = sample_seeds == "always" or (sample_seeds == "auto" and self.is_indexed and self._draws())

    def num_samples(self, epoch: int) -> int | None:
        """Samples in this epoch, where that can be known."""
        if not self.is_indexed:
            return None
        plain = self._order is None or self._order == "sequential"
        return len(self._data) if plain else len(self._drawn(epoch))

    def batch(self, *, epoch: int, position: int, size: int) -> list[int]:
        """The samples of the batch at this position; none past the end of the epoch."""
        found = self._indices(epoch, position, position + size)
        return [] if self._drop_last and len(found) < size else found

    def read(self, *, epoch: int, part: Sequence[int]) -> Any:
        """These samples, collated."""
        collate = self._collate or default_collate
        if not self.is_indexed:
            self._set_epoch(self._data, epoch)
            rows = list(islice(iter(self._data), max(part) + 1))
            return collate([rows[i] for i in part])
        rows = []
        if not self._seeded:
            seed_all(key(self._seed, "microbatch", epoch, part[0]))
        for index in part:
            if self._seeded:
                seed_all(key(self._seed, "sample", epoch, index))
            rows.append(self._data[index])
        return collate(rows)

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        if not self.is_indexed:
            self._set_epoch(self._data, epoch)
            return list(range(start, start + sum(1 for _ in islice(iter(self._data), start, stop))))
        total = len(self._data)
        if self._order == "sequential":
            return list(range(total))[start:stop]
        if self._order is None:
            return [int(i) for i in Permutation(num_samples=total, seed=self._seed, epoch=epoch)[start:stop]]
        return self._drawn(epoch)[start:stop]

    def _drawn(self, epoch: int) -> list[int]:
        with preserved():
            seed_all(key(self._seed, "order", epoch))
            self._set_epoch(self._order, epoch)
            if callable(self._order):
                return [int(i) for i in self._order(len(self._data), epoch, self._seed)]
            return [int(i) for i in self._order]

    @staticmethod
    def _set_epoch(holder: Any, epoch: int) -> None:
        if hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)

    def _draws(self) -> bool:
        """Whether reading the first or the middle sample moves a global generator."""
        for index in {0, len(self._data) // 2}:
            before = _generators()
            self._data[index]
            if _generators() != before:
                return True
        return False


def merged(parts: Sequence[Any], collated: Callable[[], Any]) -> Any:
    """Several microbatches as one, for layers that see all replicas at once; anew where they can't be joined."""
    try:
        return parts[0] if len(parts) == 1 else _joined(parts)
    except (TypeError, RuntimeError):
        return collated()


def _joined(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(_joined(column) for column in zip(*parts, strict=True))
    raise TypeError(type(first).__name__)


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
