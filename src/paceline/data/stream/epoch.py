"""An epoch of a stream on one replica: which shards each batch is taken from, and the reading of the needed shards."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn

from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.data.order.virtual_shards import block_sizes, samples_per_shard
from paceline.data.reader_process import read_in_process
from paceline.data.source import Source
from paceline.data.stream.rank_mismatch import NOT_SEEDED_CAUSE, SEED_HINT, WHOLE_STREAM_HINT, mismatch_error
from paceline.data.stream.shard_buffer import ShardBuffer
from paceline.data.stream.shard_reader import Record, ShardPosition, ShardReader
from paceline.data.stream.shard_workers import InProcessShards, ShardRequest, WorkerShards
from paceline.data.stream.virtual_sharding import StreamSharding
from paceline.data.types import BatchPartition
from paceline.errors import DataError

NUM_BATCHES_AHEAD = 4  # how many batches replicas plan at once, if they divide the shards between them
NUM_FIRST_SAMPLES = 4  # how many samples of a shard are compared at the start of an epoch
NUM_DIAGNOSED_SAMPLES = 64  # how many are compared to find out why the first samples differ
GatherJson = Callable[[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """The settings that all epochs of a loader share.

    `gather_json` gathers a value from every replica. Without it, or if the stream is not split, every replica reads
    all shards.
    """

    sharding: StreamSharding
    source: Source
    partition: BatchPartition
    seed: int | None
    gather_json: GatherJson | None

    @property
    def divides_shards(self) -> bool:
        """True if the replicas divide the shards between them."""
        return self.gather_json is not None and self.sharding.shards > 1 and self.partition.replicas > 1

    def needed_shards(self, shard_counts: Sequence[int], replica: int) -> frozenset[int]:
        """Return the shards that a replica reads for a batch.

        These are the shards of its microbatches. If the shards are not divided, they are all shards with samples.
        """
        if not self.divides_shards:
            return frozenset(shard for shard in range(len(shard_counts)) if shard_counts[shard])
        return _shards_by_replica(self.partition, tuple(shard_counts))[replica]


class Epoch:
    """An epoch of a stream. `next_batch` plans how many samples each shard gives next; `take_batch` returns them.

    `num_read` is, by shard, the number of samples in the batches that were taken. `saved` is a result of `state`.
    """

    def __init__(self, *, settings: StreamSettings, number: int, saved: Mapping[str, Any] | None = None) -> None:
        self._settings = settings
        self._number = number
        shards = settings.sharding.shards
        saved = saved or {}
        self.num_read: list[int] = list(saved.get("read", [0] * shards))
        self._ended: list[bool] = list(saved.get("ended", [False] * shards))
        self._records: dict[int, Record] = {int(k): v for k, v in saved.get("records", {}).items()}
        self._planned_batches: deque[list[int]] = deque()
        self._is_over = False
        self._buffers: dict[int, ShardBuffer] = {}
        self._pools: list[InProcessShards | WorkerShards] = []
        live_shards = [shard for shard in range(shards) if not self._ended[shard]]
        shard_counts = [0] * shards
        for shard, num_samples in (
            zip(live_shards, block_sizes(settings.partition.global_batch_size, len(live_shards)), strict=True)
            if live_shards
            else ()
        ):
            shard_counts[shard] = num_samples
        self._shard_counts = shard_counts  # how many samples each shard gives to the first batch
        self._last_needed_shards = [
            settings.needed_shards(shard_counts, replica) for replica in range(settings.partition.replicas)
        ]
        self._open_shards(sorted(self._last_needed_shards[settings.partition.replica]))
        if not saved:
            try:
                self._compare_first_samples()
            except BaseException:
                self.close()
                raise

    @property
    def notes(self) -> list[str]:
        """The readers' notes since this property was last read."""
        notes = [note for buffer in self._buffers.values() for note in buffer.notes]
        for buffer in self._buffers.values():
            buffer.notes.clear()
        return notes

    @property
    def checksum(self) -> int:
        """A value that must be equal on all replicas: the number of samples read, or their checksum if not split."""
        first_buffer = self._buffers.get(0)
        return (
            first_buffer.checksum
            if self._settings.sharding.shards == 1 and first_buffer is not None
            else sum(self.num_read)
        )

    def next_batch(self) -> list[int] | None:
        """Return how many samples the next batch takes from each shard; None at the end of the epoch."""
        while not self._planned_batches and not self._is_over:
            self._plan()
        return self._planned_batches[0] if self._planned_batches else None

    def take_batch(self) -> list[Any]:
        """Return the batch's samples in order, with None for each sample of a shard that this replica doesn't read."""
        shard_counts = self._planned_batches.popleft()
        needed = self._settings.needed_shards(shard_counts, self._settings.partition.replica)
        self._catch_up(sorted(needed - set(self._buffers)))
        samples: list[Any] = []
        for shard, count in enumerate(shard_counts):
            buffer = self._buffers.get(shard)
            shard_samples = buffer.take(count) if buffer is not None else [None] * count
            if len(shard_samples) != count:
                raise _short_shard_error(shard)
            samples += shard_samples
            self.num_read[shard] += count
        if self._settings.divides_shards:
            for shard in sorted(set(self._buffers) - needed):
                self._buffers.pop(shard).release()
        return samples

    def state(self) -> dict[str, Any]:
        """Return the position of every shard as JSON. Every replica calls this."""
        records = self._gather_records()
        ended = [done and shard not in records for shard, done in enumerate(self._ended)]
        return {"read": list(self.num_read), "ended": ended, "records": {str(k): v for k, v in records.items()}}

    def close(self) -> None:
        """Stop reading."""
        for pool in self._pools:
            pool.close()

    def _open_shards(self, shards: Sequence[int]) -> None:
        """Start to read these shards, in data workers if there are any."""
        settings = self._settings
        requests = [
            ShardRequest(
                position=self._position_of(shard),
                chunk_size=max(1, self._shard_counts[shard]),
                record=self._records.get(shard),
            )
            for shard in shards
        ]
        pool: InProcessShards | WorkerShards = InProcessShards(sharding=settings.sharding, requests=requests)
        if settings.source.workers and requests:
            pool = WorkerShards(sharding=settings.sharding, requests=requests, source=settings.source)
        self._pools.append(pool)
        for request in requests:
            self._buffers[request.position.shard] = ShardBuffer(
                shard=request.position.shard, pool=pool, record=request.record
            )

    def _catch_up(self, shards: Sequence[int]) -> None:
        """Start to read shards that this replica does not read now, and skip the samples of earlier batches."""
        if shards:
            self._open_shards(shards)
        for shard in shards:
            buffer = self._buffers[shard]
            buffer.take(self.num_read[shard] - buffer.num_read)
            if buffer.num_read != self.num_read[shard]:
                raise _short_shard_error(shard)

    def _raise_mismatch(self, gather_json: GatherJson, shard: int, *, ranks: tuple[int, int]) -> NoReturn:
        """Raise an error that explains why two ranks have different samples.

        To find out, every replica reads the first samples of the shard twice.

        Raises:
            DataError: always.
        """
        if isinstance(self._settings.source.data, Iterator):  # an iterator can be read only once
            local_checksums = [self._buffers[shard].peek_checksums(NUM_DIAGNOSED_SAMPLES)] * 2
        else:
            local_checksums = read_in_process(
                self._settings.source,
                lambda: [self._read_first_checksums(shard, NUM_DIAGNOSED_SAMPLES) for _ in range(2)],
            )
        checksums_by_rank = gather_json(local_checksums)
        where = f"shard {shard} of the stream" if self._settings.sharding.shards > 1 else "the stream"
        raise mismatch_error(
            [first for first, _ in checksums_by_rank], [second for _, second in checksums_by_rank], ranks, where=where
        )

    def _read_first_checksums(self, shard: int, num_samples: int = NUM_FIRST_SAMPLES) -> list[int]:
        """Return the checksums of the first samples of a shard, read separately from its buffer."""
        reader = ShardReader(sharding=self._settings.sharding, position=self._position_of(shard))
        return [sample.crc for sample in reader.read_chunk(num_samples).samples]

    def _position_of(self, shard: int) -> ShardPosition:
        return ShardPosition(shard=shard, epoch=self._number, seed=self._settings.seed)

    def _plan(self) -> None:
        """Read ahead, agree with the other replicas on the available samples, and plan the next batches."""
        size, num_ahead = (
            self._settings.partition.global_batch_size,
            1 if not self._settings.divides_shards else NUM_BATCHES_AHEAD,
        )
        while not self._planned_batches and not self._is_over:
            available = self._gather_available(num_ahead)
            while len(self._planned_batches) < NUM_BATCHES_AHEAD and not self._is_over:
                shard_counts = samples_per_shard(available=available, ended=self._ended, size=size)
                if shard_counts is None:
                    break
                if not any(shard_counts) or (self._settings.partition.drop_last and sum(shard_counts) < size):
                    self._is_over = True
                    break
                self._planned_batches.append(shard_counts)
                available = [num_samples - count for num_samples, count in zip(available, shard_counts, strict=True)]
            if num_ahead > size:
                for buffer in self._buffers.values():
                    buffer.raise_error()
            num_ahead *= 2
        self._share_records()

    def _gather_available(self, num_ahead: int) -> list[int]:
        """Return how many samples of each shard were read ahead, and record which shards have ended.

        The result is the same on all replicas.
        """
        for shard, buffer in self._buffers.items():
            buffer.read_ahead(num_ahead * max(1, self._shard_counts[shard]) + 1)
        local_progress = {
            str(shard): [buffer.num_buffered, buffer.has_ended, buffer.num_read, buffer.checksum]
            for shard, buffer in self._buffers.items()
        }
        available = [0] * len(self.num_read)
        progress_by_shard: dict[int, tuple[int, Any]] = {}
        for rank, progress in enumerate(self._gather(local_progress)):
            for name, (num_buffered, has_ended, num_read, crc) in progress.items():
                shard = int(name)
                other, previous = progress_by_shard.setdefault(shard, (rank, [num_read, crc]))
                if previous != [num_read, crc]:
                    raise _different_samples_error(shard, other, rank)
                available[shard] = max(available[shard], num_buffered)
                self._ended[shard] = self._ended[shard] or has_ended
        return available

    def _share_records(self) -> None:
        """Gather every shard's record on all replicas, if a replica's shards change within the planned batches."""
        if not self._settings.divides_shards:
            return
        needs = [self._last_needed_shards]
        needs += [
            [self._settings.needed_shards(shard_counts, r) for r in range(self._settings.partition.replicas)]
            for shard_counts in self._planned_batches
        ]
        if any(before != after for before, after in pairwise(needs)):
            self._records = self._gather_records()
        self._last_needed_shards = needs[-1]

    def _gather_records(self) -> dict[int, Record]:
        local_records = {str(shard): buffer.record() for shard, buffer in self._buffers.items()}
        records: dict[int, Record] = {}
        for rank_records in self._gather(local_records):
            for name, record in rank_records.items():
                records.setdefault(int(name), record)
        return records

    def _gather(self, value: Any) -> list[Any]:
        """Return the value of every replica, or only the local one if the shards are not divided."""
        return (
            self._settings.gather_json(value)
            if self._settings.divides_shards and self._settings.gather_json is not None
            else [value]
        )

    def _compare_first_samples(self) -> None:
        """Compare the first samples of each shard between replicas.

        If the shards are divided, each replica also reads the first samples of the next replica's shards for this.
        Otherwise, all replicas read the same shards anyway.
        """
        if self._settings.gather_json is None:
            return
        partition = self._settings.partition
        local_checksums = {str(s): buffer.peek_checksums(NUM_FIRST_SAMPLES) for s, buffer in self._buffers.items()}
        if self._settings.divides_shards:
            next_shards = self._last_needed_shards[(partition.replica + 1) % partition.replicas] - set(self._buffers)
            if next_shards:
                local_checksums |= read_in_process(
                    self._settings.source, lambda: {str(s): self._read_first_checksums(s) for s in next_shards}
                )
        checksums_by_shard: dict[str, tuple[int, list[int]]] = {}
        for rank, rank_checksums in enumerate(self._settings.gather_json(local_checksums)):
            for name, checksums in rank_checksums.items():
                other, previous = checksums_by_shard.setdefault(name, (rank, checksums))
                if previous != checksums:
                    self._raise_mismatch(self._settings.gather_json, int(name), ranks=(other, rank))
        shard_by_checksums: dict[tuple[int, ...], str] = {}
        for name, (_, checksums) in sorted(checksums_by_shard.items()):
            equal_shard = shard_by_checksums.setdefault(tuple(checksums), name)
            if equal_shard != name and len(set(checksums)) == NUM_FIRST_SAMPLES:
                raise DataError(
                    f"shards {equal_shard} and {name} of the stream start with the same {NUM_FIRST_SAMPLES} samples.",
                    cause="shard(num_shards=, index=) returns the same samples for every index",
                    hint="--data.shards 1, with which every replica reads the whole stream",
                )


@lru_cache(maxsize=64)
def _shards_by_replica(partition: BatchPartition, shard_counts: tuple[int, ...]) -> list[frozenset[int]]:
    """Return, by replica, the shards that its microbatches take samples from; cached, since most batches are alike."""
    size, result = sum(shard_counts), []
    bounds = [sum(shard_counts[:shard]) for shard in range(len(shard_counts) + 1)]
    micro = -(-size // partition.micro_batch_size)
    for replica in range(partition.replicas):
        ranges = [
            (index * partition.micro_batch_size, min((index + 1) * partition.micro_batch_size, size))
            for index in assign_microbatches(micro, replica=replica, replicas=partition.replicas)
        ]
        result.append(
            frozenset(
                shard
                for shard in range(len(shard_counts))
                if any(max(start, bounds[shard]) < min(stop, bounds[shard + 1]) for start, stop in ranges)
            )
        )
    return result


def _different_samples_error(shard: int, rank: int, other: int) -> DataError:
    return DataError(
        f"shard {shard} of the stream gives different samples on rank {other} and rank {rank}.",
        cause=f"{NOT_SEEDED_CAUSE}, or depends on the rank",
        hint=f"{SEED_HINT}; {WHOLE_STREAM_HINT}",
    )


def _short_shard_error(shard: int) -> DataError:
    return DataError(
        f"shard {shard} of the stream has fewer samples than at the first read.", cause=NOT_SEEDED_CAUSE, hint=SEED_HINT
    )
