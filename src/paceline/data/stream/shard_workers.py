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
from typing_extensions import override

from paceline.data.fetch import start_function
from paceline.data.source import Source
from paceline.data.stream.shard_reader import Record, ShardChunk, ShardPosition, ShardReader
from paceline.data.stream.virtual_sharding import StreamSharding
from paceline.data.worker_serialization import deserialize, serialization_error
from paceline.data.workers import close_at_exit, guard_worker_death, loader_arguments, start_workers, worker_generator
from paceline.torch_internals.private_api import hide_worker_info, stop_data_workers
from paceline.torch_internals.rng import stream_key


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """A shard to read, `chunk_size` samples at a time, from its start or from a record."""

    position: ShardPosition
    chunk_size: int
    record: Record | None = None


class InProcessShards:
    """The shards that are read in this process."""

    def __init__(self, *, sharding: StreamSharding, requests: list[ShardRequest]) -> None:
        self._chunk_sizes = {request.position.shard: request.chunk_size for request in requests}
        self._readers = _open_readers(sharding, requests)

    def read_chunk(self, shard: int) -> ShardChunk:
        """Return the next chunk of a shard."""
        return self._readers[shard].read_chunk(self._chunk_sizes[shard])

    def release(self, shard: int) -> None:
        """Release a shard that is not needed any more."""
        self._readers.pop(shard, None)

    def close(self) -> None:
        """Do nothing: no process runs in the background."""


class WorkerShards:
    """The shards that data workers read ahead; one worker reads all of a shard."""

    def __init__(self, *, sharding: StreamSharding, requests: list[ShardRequest], source: Source) -> None:
        first = requests[0].position
        self._pending_chunks: dict[int, deque[ShardChunk]] = {request.position.shard: deque() for request in requests}
        workers = min(source.workers, len(requests))
        dataset = _ShardDataset(sharding=sharding, requests_by_worker=[requests[k::workers] for k in range(workers)])
        init_worker = start_function(source, user_code_sees_one_worker=True, parent=os.getpid())

        def start(worker: int) -> None:
            init_worker(worker)
            dataset.worker = worker

        loader = DataLoader(
            dataset,
            num_workers=workers,
            worker_init_fn=start,
            generator=worker_generator(stream_key(first.seed or 0, "workers", first.epoch, first.shard)),
            **loader_arguments(source),
        )
        with start_workers(workers):
            self._iterator: Any = iter(loader)
        self._items = guard_worker_death(self._iterator)
        close_at_exit(self)

    def read_chunk(self, shard: int) -> ShardChunk:
        """Return the next chunk of a shard."""
        while not self._pending_chunks[shard]:
            for other_shard, chunk in deserialize(next(self._items)):
                if other_shard in self._pending_chunks:
                    self._pending_chunks[other_shard].append(_unpack_chunk(chunk))
        return self._pending_chunks[shard].popleft()

    def release(self, shard: int) -> None:
        """Release a shard that is not needed any more."""
        self._pending_chunks.pop(shard, None)

    def close(self) -> None:
        """Stop the workers, and wait until they have ended."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            stop_data_workers(iterator)


class _ShardDataset(IterableDataset[bytes]):
    """The dataset of a data worker. An item is serialized, and has one chunk of each shard that has not ended."""

    def __init__(self, *, sharding: StreamSharding, requests_by_worker: list[list[ShardRequest]]) -> None:
        self._sharding = sharding
        self._requests_by_worker = requests_by_worker
        self.worker = 0  # the number of this worker, which is set when the worker starts

    @override
    def __iter__(self) -> Iterator[bytes]:
        hide_worker_info()
        requests = self._requests_by_worker[self.worker]
        readers = _open_readers(self._sharding, requests)
        chunk_sizes = {request.position.shard: request.chunk_size for request in requests}
        while readers:
            chunks = {shard: reader.read_chunk(chunk_sizes[shard]) for shard, reader in readers.items()}
            yield _serialize_chunks(chunks)
            readers = {s: r for s, r in readers.items() if not chunks[s].has_ended and chunks[s].error is None}


def _open_readers(sharding: StreamSharding, requests: list[ShardRequest]) -> dict[int, ShardReader]:
    return {
        request.position.shard: ShardReader(sharding=sharding, position=request.position, record=request.record)
        for request in requests
    }


def _serialize_chunks(chunks: Mapping[int, ShardChunk]) -> bytes:
    """Serialize the chunks of an item; if that fails, each chunk has the error instead of samples."""
    try:
        return pickle.dumps([(shard, _pack_chunk(chunk)) for shard, chunk in chunks.items()], protocol=5)
    except Exception as error:
        return pickle.dumps(
            [(shard, ShardChunk(samples=[], error=serialization_error(error))) for shard in chunks], protocol=5
        )


_BY_VALUE_DTYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
          torch.uint8, torch.bool)  # fmt: skip


@dataclass(frozen=True)
class _TensorByValue:
    """A tensor that is sent to another process by value, which for small tensors is faster than shared memory."""

    values: Any


def _pack_chunk(chunk: ShardChunk) -> ShardChunk:
    return replace(chunk, samples=[replace(s, sample=tensors_by_value(s.sample)) for s in chunk.samples])


def _unpack_chunk(chunk: ShardChunk) -> ShardChunk:
    return replace(chunk, samples=[replace(s, sample=restore_tensors(s.sample)) for s in chunk.samples])


def tensors_by_value(value: Any) -> Any:
    """Return a sample, or a list of samples, with tensors replaced by `_TensorByValue`."""
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        return _TensorByValue(value.numpy()) if value.dtype in _BY_VALUE_DTYPES and not value.requires_grad else value
    return _map_items(value, tensors_by_value)


def restore_tensors(value: Any) -> Any:
    """Return a sample, or a list of samples, with each `_TensorByValue` replaced by a tensor."""
    if type(value) is _TensorByValue:
        return torch.from_numpy(np.asarray(value.values))
    return _map_items(value, restore_tensors)


def _map_items(value: Any, change: Any) -> Any:
    if type(value) is dict:
        return {name: change(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value
