"""Reading of a replica's shards: in this process when they are needed, or ahead of time in data workers."""

import os
import pickle
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.fetch import worker_init
from paceline.data.source import Source
from paceline.data.stream.shard_reader import Record, ShardChunk, ShardPosition, ShardReader
from paceline.data.stream.virtual_sharding import StreamSharding
from paceline.data.worker_serialization import load, not_sent
from paceline.data.workers import closed_at_exit, guard_worker_death, kept_settings, start_workers, worker_seeds
from paceline.torch_internals.private_api import hide_worker, stop_data_workers
from paceline.torch_internals.rng import stream_key


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """A shard to read, `chunk_size` samples at a time, from its start or from a record."""

    stand: ShardPosition
    portion: int
    record: Record | None = None


class InProcessShards:
    """The shards that are read in this process."""

    def __init__(self, *, split: StreamSharding, wishes: list[ShardRequest]) -> None:
        self._portions = {wish.stand.shard: wish.portion for wish in wishes}
        self._readers = {w.stand.shard: ShardReader(split=split, stand=w.stand, record=w.record) for w in wishes}

    def chunk(self, shard: int) -> ShardChunk:
        """Return the next rows of a shard."""
        return self._readers[shard].chunk(self._portions[shard])

    def drop(self, shard: int) -> None:
        """Release a shard that is not needed any more."""
        self._readers.pop(shard, None)

    def close(self) -> None:
        """Do nothing: no process runs in the background."""


class WorkerShards:
    """The shards that data workers read ahead, each shard in one of them."""

    def __init__(self, *, split: StreamSharding, wishes: list[ShardRequest], source: Source) -> None:
        first = wishes[0].stand
        self._waiting: dict[int, deque[ShardChunk]] = {wish.stand.shard: deque() for wish in wishes}
        workers = min(source.workers, len(wishes))
        rounds = _Rounds(split=split, hands=[wishes[k::workers] for k in range(workers)])
        started = worker_init(source, alone=True, parent=os.getpid())

        def start(number: int) -> None:
            started(number)
            rounds.worker = number

        loader = DataLoader(
            rounds,
            num_workers=workers,
            worker_init_fn=start,
            generator=worker_seeds(stream_key(first.seed or 0, "workers", first.epoch, first.shard)),
            **kept_settings(source),
        )
        with start_workers(workers):
            self._iterator: Any = iter(loader)
        self._rounds = guard_worker_death(self._iterator)
        closed_at_exit(self)

    def chunk(self, shard: int) -> ShardChunk:
        """Return the next rows of a shard."""
        while not self._waiting[shard]:
            for number, chunk in load(next(self._rounds)):
                if number in self._waiting:
                    self._waiting[number].append(_unpacked(chunk))
        return self._waiting[shard].popleft()

    def drop(self, shard: int) -> None:
        """Release a shard that is not needed any more."""
        self._waiting.pop(shard, None)

    def close(self) -> None:
        """Stop the workers, and wait until they have ended."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            stop_data_workers(iterator)


class _Rounds(IterableDataset[bytes]):
    """A dataset in a data worker: each item has a chunk of each of the worker's shards that still has samples."""

    def __init__(self, *, split: StreamSharding, hands: list[list[ShardRequest]]) -> None:
        self._split = split
        self._hands = hands
        self.worker = 0

    def __iter__(self) -> Iterator[bytes]:
        hide_worker()
        mine = self._hands[self.worker]
        readers = {w.stand.shard: ShardReader(split=self._split, stand=w.stand, record=w.record) for w in mine}
        portions: Mapping[int, int] = {wish.stand.shard: wish.portion for wish in mine}
        while readers:
            found = {shard: reader.chunk(portions[shard]) for shard, reader in readers.items()}
            yield _serialized(found)
            readers = {s: r for s, r in readers.items() if not found[s].ended and found[s].trouble is None}


def _serialized(found: Mapping[int, ShardChunk]) -> bytes:
    """Serialize the chunks of an item; if that fails, each chunk has the error instead of samples."""
    try:
        return pickle.dumps([(shard, _packed(chunk)) for shard, chunk in found.items()], protocol=5)
    except Exception as error:
        return pickle.dumps([(shard, ShardChunk(rows=[], trouble=not_sent(error))) for shard in found], protocol=5)


_LIGHT = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool)  # fmt: skip


@dataclass(frozen=True)
class _Tensor:
    """A tensor that is sent to another process by value, which for small tensors is faster than shared memory."""

    values: Any


def _packed(chunk: ShardChunk) -> ShardChunk:
    return replace(chunk, rows=[replace(row, sample=as_light(row.sample)) for row in chunk.rows])


def _unpacked(chunk: ShardChunk) -> ShardChunk:
    return replace(chunk, rows=[replace(row, sample=as_full(row.sample)) for row in chunk.rows])


def as_light(value: Any) -> Any:
    """Return a sample, or a list of samples, with tensors replaced by `_Tensor`."""
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        return _Tensor(value.numpy()) if value.dtype in _LIGHT and not value.requires_grad else value
    return _mapped(value, as_light)


def as_full(value: Any) -> Any:
    """Return a sample, or a list of samples, with each `_Tensor` replaced by a tensor."""
    if type(value) is _Tensor:
        return torch.from_numpy(np.asarray(value.values))
    return _mapped(value, as_full)


def _mapped(value: Any, change: Any) -> Any:
    if type(value) is dict:
        return {name: change(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value
