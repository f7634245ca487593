"""Data that can only be iterated: each replica reads the whole stream and keeps its own microbatches.

That is exact for any number of replicas and costs reading. A rolling checksum of all samples finds a stream
that gives other samples when it is read again: between replicas at every step, and on resume.
"""

import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from paceline.errors import DataError, JobError
from paceline.feed.fetch import checked, trouble
from paceline.feed.source import Source
from paceline.feed.types import Cut, LocalMicro, StepInput
from paceline.order.batches import Batch, Microbatch
from paceline.order.cursor import Cursor
from paceline.order.deal import deal


class StreamFeed:
    """The feed over an iterable."""

    num_samples: int | None = None

    def __init__(self, *, source: Source, cut: Cut, cursor: Cursor) -> None:
        if source.order is not None:
            raise JobError("order= needs data that can be indexed.", hint="leave order= out for an iterable")
        self._source = source
        self._cut = cut
        self._cursor = cursor
        self._checksum = 0
        self._expected: int | None = None
        self.notes = (
            *source.notes,
            "data: a stream; every replica reads all of it and keeps its own microbatches (exact, costs reading)",
        )

    def __iter__(self) -> Iterator[StepInput]:
        """Endless: the stream is read again for each epoch."""
        cursor = self._cursor
        samples = self._resumed(cursor)
        while True:
            rows = list(islice(samples, self._cut.global_batch_size))
            if not rows or (self._cut.drop_last and len(rows) < self._cut.global_batch_size):
                if cursor.position == 0:
                    raise DataError("the stream of train_data is empty.", hint="check the path it reads from")
                cursor = Cursor(epoch=cursor.epoch + 1, samples=cursor.samples, step=cursor.step)
                samples = self._opened(cursor.epoch)
                continue
            batch = _batch(cursor, len(rows), self._cut.micro_batch_size)
            cursor = batch.after
            for row in rows:
                self._checksum = checksum(row, self._checksum)
            yield StepInput(batch=batch, micro=self._local(batch, rows), fingerprint=self._checksum & 0xFFFFFF)

    def state(self) -> Mapping[str, Any]:
        """The checksum of what was read so far in this epoch."""
        return {"checksum": self._checksum}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The checksum that reading again must give."""
        self._expected = int(state["checksum"])

    def close(self) -> None:
        """Nothing runs in the background."""

    def _opened(self, epoch: int) -> Iterator[Any]:
        self._checksum = 0
        if hasattr(self._source.data, "set_epoch"):
            self._source.data.set_epoch(epoch)
        return _named(iter(self._source.data))

    def _resumed(self, cursor: Cursor) -> Iterator[Any]:
        samples = self._opened(cursor.epoch)
        skipped = 0
        for row in islice(samples, cursor.position):
            self._checksum = checksum(row, self._checksum)
            skipped += 1
        if skipped < cursor.position or (self._expected is not None and self._checksum != self._expected):
            raise DataError(
                f"the stream differs from what this run read before (first {cursor.position} samples).",
                cause="the iterable is not the same each time it is read",
                hint="seed it, or make it depend on set_epoch(epoch) alone",
            )
        return samples

    def _local(self, batch: Batch, rows: list[Any]) -> tuple[LocalMicro, ...]:
        first = batch.cursor.position
        collate = self._source.collate or default_collate
        found = []
        for index in deal(len(batch.micro), replica=self._cut.replica, replicas=self._cut.replicas):
            micro = batch.micro[index]
            part = rows[micro.start - first : micro.stop - first]
            found.append(_micro(index, part, collate, tuple(range(micro.start, micro.stop))))
        return tuple(found)


def stream_once(*, source: Source, batch_size: int, replica: int, replicas: int) -> Iterator[LocalMicro]:
    """One pass for evaluation: each sample on exactly one replica."""
    samples = _named(iter(source.data))
    collate = source.collate or default_collate
    index = 0
    while rows := list(islice(samples, batch_size)):
        if index % replicas == replica:
            start = index * batch_size
            yield _micro(index, rows, collate, tuple(range(start, start + len(rows))))
        index += 1


def checksum(sample: Any, start: int) -> int:
    """A running CRC of a sample's content."""
    if isinstance(sample, torch.Tensor):
        return checksum(sample.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), start)
    if isinstance(sample, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(sample).tobytes(), start)
    if isinstance(sample, Mapping):
        for name in sample:
            start = checksum(sample[name], zlib.crc32(str(name).encode(), start))
        return start
    if isinstance(sample, tuple | list):
        for part in sample:
            start = checksum(part, start)
        return start
    return zlib.crc32(repr(sample).encode(), start)


def _batch(cursor: Cursor, size: int, micro_batch_size: int) -> Batch:
    stop = cursor.position + size
    starts = range(cursor.position, stop, micro_batch_size)
    micro = tuple(
        Microbatch(index=i, start=start, stop=min(start + micro_batch_size, stop)) for i, start in enumerate(starts)
    )
    after = Cursor(epoch=cursor.epoch, position=stop, samples=cursor.samples + size, step=cursor.step + 1)
    return Batch(cursor=cursor, after=after, micro=micro)


def _micro(index: int, rows: list[Any], collate: Any, indices: tuple[int, ...]) -> LocalMicro:
    try:
        data = collate(rows)
    except Exception as error:
        data = trouble(error, doing="collating samples of a stream", hint="collate=lambda samples: ...")
    return LocalMicro(index=index, num_samples=len(rows), data=checked(data), indices=indices)


def _named(samples: Iterator[Any]) -> Iterator[Any]:
    """The same samples; an exception of the user's iterator is named with its line."""
    number = 0
    while True:
        try:
            sample = next(samples)
        except StopIteration:
            return
        except Exception as error:
            checked(trouble(error, doing=f"reading sample {number} of the stream"))
        yield sample
        number += 1
