"""A reader of one virtual shard's samples, in order, from the shard's start or from a record of an earlier run.

A record says how many samples of a shard were used ("read"), and has their "checksum". It may have an "anchor": the
dataset's own state some samples earlier, with the checksum of the samples since then. A resume loads this state, reads
these samples again, and compares their checksum.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.data.checksum import checksum, extend_checksum
from paceline.data.fetch import WorkerError, worker_error
from paceline.data.stream.dataset_state_json import NotJsonConvertible, from_json, to_json
from paceline.data.stream.rank_mismatch import NOT_SEEDED_CAUSE, SEED_HINT
from paceline.data.stream.virtual_sharding import StreamSharding, call_user_dataset
from paceline.errors import DataError
from paceline.torch_internals.rng import seed_all, stream_key

ANCHOR_EVERY = 16  # samples
NUM_READ_AGAIN = 8  # the least number of samples that a resume reads again
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StreamSample:
    """A sample with its checksum; every `ANCHOR_EVERY`-th also has the dataset's state after it, as JSON."""

    sample: Any = field(repr=False)
    crc: int
    state: Any = None


@dataclass(frozen=True, kw_only=True)
class ShardChunk:
    """A chunk of consecutive samples of one shard.

    `has_ended` is True if the shard has no more samples. `error` is set if the next sample could not be read.
    """

    samples: list[StreamSample]
    has_ended: bool = False
    error: WorkerError | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShardPosition:
    """A shard in an epoch; `seed` is None if samples are not seeded."""

    shard: int
    epoch: int
    seed: int | None


class ShardReader:
    """A reader of one shard. With a record, it first reads the samples since the anchor again and compares them."""

    def __init__(self, *, sharding: StreamSharding, position: ShardPosition, record: Record | None = None) -> None:
        self._sharding = sharding
        self._position = position
        self._num_read = 0
        self._notes: list[str] = []
        self._data: Any = None
        self._iterator: Iterator[Any] | None = None
        self._record = record
        self._can_save_state = True

    def read_chunk(self, size: int) -> ShardChunk:
        """Return the next `size` samples, fewer at the end."""
        samples: list[StreamSample] = []
        try:
            if self._iterator is None:
                self._start()
            while len(samples) < size:
                samples.append(self._read_sample())
        except StopIteration:
            return ShardChunk(samples=samples, has_ended=True, notes=self._take_notes())
        except DataError as error:
            read_error = WorkerError(what=error.what, where=error.where, hint=error.hint, cause=error.cause)
            return ShardChunk(samples=samples, error=read_error)
        return ShardChunk(samples=samples, notes=self._take_notes())

    def _take_notes(self) -> tuple[str, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _start(self) -> None:
        """Open the shard at its record or its start, and check the samples that an earlier attempt read."""
        record = self._record
        if record is None:
            self._open()
            return
        anchor = record.get("anchor")
        if anchor is not None and self._is_anchor_valid(anchor, int(record["read"])):
            return
        self._open()
        if self._read_checksum(int(record["read"])) != record["checksum"]:
            raise self._changed_data_error(int(record["read"]))
        if anchor is not None:
            self._notes.append(
                f"data: the state_dict of shard {self._position.shard} is incomplete (a shuffle buffer?): "
                f"the first {record['read']:,} samples of the shard were read again, and are the same"
            )

    def _is_anchor_valid(self, anchor: Record, num_read: int) -> bool:
        """Restore the anchor's state; return whether the samples after the anchor are the same as before."""
        self._open(anchor)
        return self._read_checksum(num_read - int(anchor["read"])) == int(anchor["checksum"])

    def _read_checksum(self, num_samples: int) -> int | None:
        """Read the next samples and return their checksum; None if the shard has fewer."""
        total = 0
        try:
            for _ in range(num_samples):
                total = extend_checksum(total, self._read_sample().crc)
        except StopIteration:
            return None
        return total

    def _open(self, anchor: Record | None = None) -> None:
        """Open the shard at the state of `anchor`, or at its start."""
        self._num_read = 0 if anchor is None else int(anchor["read"])
        self._data = self._sharding.open_shard(shard=self._position.shard, epoch=self._position.epoch)
        if anchor is not None:
            state = from_json(anchor["state"])
            call_user_dataset(
                lambda: self._data.load_state_dict(state), doing=f"load_state_dict of shard {self._position.shard}"
            )
        self._seed()
        self._iterator = call_user_dataset(lambda: iter(self._data), doing="iter() of the stream")

    def _seed(self) -> None:
        position = self._position
        if position.seed is not None:
            seed_all(stream_key(position.seed, "shard", position.epoch, position.shard, self._num_read))

    def _read_sample(self) -> StreamSample:
        assert self._iterator is not None
        self._seed()
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            read_error = worker_error(error, doing=f"reading {self._sample_name()}")
            raise DataError(read_error.what, where=read_error.where) from error
        self._num_read += 1
        return StreamSample(sample=sample, crc=checksum(sample, 0), state=self._state_json())

    def _state_json(self) -> Any:
        """Return the dataset's state after every `ANCHOR_EVERY`-th sample; None after the other samples."""
        if not self._sharding.has_state or not self._can_save_state or self._num_read % ANCHOR_EVERY:
            return None
        try:
            return to_json(
                call_user_dataset(self._data.state_dict, doing=f"state_dict of shard {self._position.shard}")
            )
        except NotJsonConvertible as error:
            self._can_save_state = False
            self._notes.append(
                f"data: the state_dict of the stream contains {error}, which JSON can't hold; a "
                "resume reads the shards again from their start"
            )
            return None

    def _sample_name(self) -> str:
        where = f" of shard {self._position.shard}" if self._sharding.shards > 1 else ""
        return f"sample {self._num_read}{where} of the stream"

    def _changed_data_error(self, num_read: int) -> DataError:
        where = f" of shard {self._position.shard}" if self._sharding.shards > 1 else ""
        return DataError(
            f"the stream differs from the samples that this run has read (first {num_read} samples{where}).",
            cause=NOT_SEEDED_CAUSE,
            hint=SEED_HINT,
        )
