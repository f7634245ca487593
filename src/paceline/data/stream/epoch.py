"""An epoch of a split stream on one replica: plans each batch's samples per shard, and reads those it needs."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn

from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.data.order.virtual_shards import block_sizes, samples_per_shard
from paceline.data.reader_process import read_apart
from paceline.data.source import Source
from paceline.data.stream.rank_mismatch import EVERY_RANK, NOT_SEEDED, SEED_IT, other_stream
from paceline.data.stream.shard_buffer import ShardBuffer
from paceline.data.stream.shard_reader import Record, ShardPosition, ShardReader
from paceline.data.stream.shard_workers import InProcessShards, ShardRequest, WorkerShards
from paceline.data.stream.virtual_sharding import StreamSharding
from paceline.data.types import BatchPartition
from paceline.errors import DataError

AHEAD = 4
FIRST = 4
SEEN = 64
Agree = Callable[[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class StreamReading:
    """The settings that all epochs of a loader share.

    `gather_json` gathers a value from every replica. Without it, or if the stream is not split, every replica reads
    all shards.
    """

    split: StreamSharding
    source: Source
    cut: BatchPartition
    seed: int | None
    agree: Agree | None

    @property
    def shares(self) -> bool:
        """True if the replicas divide the shards between them."""
        return self.agree is not None and self.split.shards > 1 and self.cut.replicas > 1

    def needs(self, takes: Sequence[int], replica: int) -> frozenset[int]:
        """Return the shards that a replica's microbatches take samples from."""
        if not self.shares:
            return frozenset(shard for shard in range(len(takes)) if takes[shard])
        return _needs(self.cut, tuple(takes))[replica]


class Epoch:
    """An epoch of a stream. `next_batch` plans how many samples each shard gives next; `take_batch` returns them."""

    def __init__(self, *, reads: StreamReading, number: int, saved: Mapping[str, Any] | None = None) -> None:
        self._reads = reads
        self._number = number
        shards = reads.split.shards
        saved = saved or {}
        self.read: list[int] = list(saved.get("read", [0] * shards))
        self._ended: list[bool] = list(saved.get("ended", [False] * shards))
        self._records: dict[int, Record] = {int(k): v for k, v in saved.get("records", {}).items()}
        self._planned: deque[list[int]] = deque()
        self._over = False
        self._held: dict[int, ShardBuffer] = {}
        self._pools: list[InProcessShards | WorkerShards] = []
        live = [shard for shard in range(shards) if not self._ended[shard]]
        spread = [0] * shards
        for shard, share in zip(live, block_sizes(reads.cut.global_batch_size, len(live)), strict=True) if live else ():
            spread[shard] = share
        self._spread = spread
        self._last_needs = [reads.needs(spread, replica) for replica in range(reads.cut.replicas)]
        self._hold(sorted(self._last_needs[reads.cut.replica]))
        if not saved:
            try:
                self._compare_first()
            except BaseException:
                self.close()
                raise

    @property
    def notes(self) -> list[str]:
        """The readers' notes that were not returned before."""
        found = [note for held in self._held.values() for note in held.notes]
        for held in self._held.values():
            held.notes.clear()
        return found

    @property
    def checksum(self) -> int:
        """A checksum that must be equal on all replicas."""
        whole = self._held.get(0)
        return whole.checksum if self._reads.split.shards == 1 and whole is not None else sum(self.read)

    def next_batch(self) -> list[int] | None:
        """Return how many samples the next batch takes from each shard; None at the end of the epoch."""
        while not self._planned and not self._over:
            self._plan()
        return self._planned[0] if self._planned else None

    def give(self) -> list[Any]:
        """Return the batch's samples by position, None for those that other replicas read."""
        takes = self._planned.popleft()
        needed = self._reads.needs(takes, self._reads.cut.replica)
        self._catch_up(sorted(needed - set(self._held)))
        rows: list[Any] = []
        for shard, count in enumerate(takes):
            held = self._held.get(shard)
            part = held.take(count) if held is not None else [None] * count
            if len(part) != count:
                raise _shorter(shard)
            rows += part
            self.read[shard] += count
        if self._reads.shares:
            for shard in sorted(set(self._held) - needed):
                self._held.pop(shard).drop()
        return rows

    def state(self) -> dict[str, Any]:
        """Return the position of every shard as JSON. Every replica calls this."""
        records = self._gather_records()
        ended = [done and shard not in records for shard, done in enumerate(self._ended)]
        return {"read": list(self.read), "ended": ended, "records": {str(k): v for k, v in records.items()}}

    def close(self) -> None:
        """Stop reading."""
        for pool in self._pools:
            pool.close()

    def _hold(self, shards: Sequence[int]) -> None:
        """Start to read these shards, in data workers if there are any."""
        reads = self._reads
        wishes = [
            ShardRequest(stand=self._stand(shard), portion=max(1, self._spread[shard]), record=self._records.get(shard))
            for shard in shards
        ]
        pool: InProcessShards | WorkerShards = InProcessShards(split=reads.split, wishes=wishes)
        if reads.source.workers and wishes:
            pool = WorkerShards(split=reads.split, wishes=wishes, source=reads.source)
        self._pools.append(pool)
        for wish in wishes:
            self._held[wish.stand.shard] = ShardBuffer(shard=wish.stand.shard, pool=pool, record=wish.record)

    def _catch_up(self, shards: Sequence[int]) -> None:
        """Start to read shards that other replicas have read so far, and skip the samples that were used."""
        if shards:
            self._hold(shards)
        for shard in shards:
            held = self._held[shard]
            held.take(self.read[shard] - held.read)
            if held.read != self.read[shard]:
                raise _shorter(shard)

    def _refuse_other(self, agree: Agree, shard: int, *, ranks: tuple[int, int]) -> NoReturn:
        """Raise an error that explains why two ranks have different samples; first, every replica reads samples twice.

        Raises:
            DataError: always.
        """
        if isinstance(self._reads.source.data, Iterator):  # it can be read only once
            mine = [self._held[shard].first(SEEN)] * 2
        else:
            mine = read_apart(self._reads.source, lambda: [self._first(shard, SEEN) for _ in range(2)])
        everybody = agree(mine)
        where = f"shard {shard} of the stream" if self._reads.split.shards > 1 else "the stream"
        raise other_stream([first for first, _ in everybody], [again for _, again in everybody], ranks, where=where)

    def _first(self, shard: int, samples: int = FIRST) -> list[int]:
        """Return the checksums of the first samples of a shard that other replicas read."""
        reader = ShardReader(split=self._reads.split, stand=self._stand(shard))
        return [row.crc for row in reader.chunk(samples).rows]

    def _stand(self, shard: int) -> ShardPosition:
        return ShardPosition(shard=shard, epoch=self._number, seed=self._reads.seed)

    def _plan(self) -> None:
        """Read ahead, agree with the other replicas on the available samples, and plan the next batches."""
        size, ahead = self._reads.cut.global_batch_size, 1 if not self._reads.shares else AHEAD
        while not self._planned and not self._over:
            have = self._agreed(ahead)
            while len(self._planned) < AHEAD and not self._over:
                takes = samples_per_shard(have=have, ended=self._ended, size=size)
                if takes is None:
                    break
                if not any(takes) or (self._reads.cut.drop_last and sum(takes) < size):
                    self._over = True
                    break
                self._planned.append(takes)
                have = [left - count for left, count in zip(have, takes, strict=True)]
            if ahead > size:
                for held in self._held.values():
                    held.fail()
            ahead *= 2
        self._share_records()

    def _agreed(self, ahead: int) -> list[int]:
        """Return how many samples of each shard were read ahead; the result is the same on all replicas."""
        for shard, held in self._held.items():
            held.ensure(ahead * max(1, self._spread[shard]) + 1)
        mine = {str(s): [h.have, h.ended, h.read, h.checksum] for s, h in self._held.items()}
        have = [0] * len(self.read)
        seen: dict[int, tuple[int, Any]] = {}
        for rank, theirs in enumerate(self._everybody(mine)):
            for name, (left, ended, read, total) in theirs.items():
                shard = int(name)
                other, before = seen.setdefault(shard, (rank, [read, total]))
                if before != [read, total]:
                    raise _differs(shard, other, rank)
                have[shard] = max(have[shard], left)
                self._ended[shard] = self._ended[shard] or ended
        return have

    def _share_records(self) -> None:
        """Gather the record of every shard on all replicas, if another replica reads a shard in the planned batches."""
        if not self._reads.shares:
            return
        needs = [self._last_needs]
        needs += [[self._reads.needs(takes, r) for r in range(self._reads.cut.replicas)] for takes in self._planned]
        if any(one != other for one, other in pairwise(needs)):
            self._records = self._gather_records()
        self._last_needs = needs[-1]

    def _gather_records(self) -> dict[int, Record]:
        mine = {str(shard): held.record() for shard, held in self._held.items()}
        found: dict[int, Record] = {}
        for theirs in self._everybody(mine):
            for name, record in theirs.items():
                found.setdefault(int(name), record)
        return found

    def _everybody(self, mine: Any) -> list[Any]:
        return self._reads.agree(mine) if self._reads.shares and self._reads.agree is not None else [mine]

    def _compare_first(self) -> None:
        """Compare the first samples of each shard between two replicas: each also reads those of the next replica.

        If the stream is not split, every replica has read the same samples, and all are compared.
        """
        if self._reads.agree is None:
            return
        cut, mine = self._reads.cut, {str(shard): held.first(FIRST) for shard, held in self._held.items()}
        if self._reads.shares:
            theirs = self._last_needs[(cut.replica + 1) % cut.replicas] - set(self._held)
            if theirs:
                mine |= read_apart(self._reads.source, lambda: {str(each): self._first(each) for each in theirs})
        firsts: dict[str, tuple[int, list[int]]] = {}
        for rank, theirs in enumerate(self._reads.agree(mine)):
            for name, numbers in theirs.items():
                other, before = firsts.setdefault(name, (rank, numbers))
                if before != numbers:
                    self._refuse_other(self._reads.agree, int(name), ranks=(other, rank))
        seen: dict[tuple[int, ...], str] = {}
        for name, (_, numbers) in sorted(firsts.items()):
            twin = seen.setdefault(tuple(numbers), name)
            if twin != name and len(set(numbers)) == FIRST:
                raise DataError(
                    f"shards {twin} and {name} of the stream start with the same {FIRST} samples.",
                    cause="shard(num_shards=, index=) returns the same samples for every index",
                    hint="--data.shards 1 reads the stream whole on every replica",
                )


@lru_cache(maxsize=64)
def _needs(cut: BatchPartition, takes: tuple[int, ...]) -> list[frozenset[int]]:
    """Return the shards that each replica's microbatches take samples from; cached, since most batches are alike."""
    size, found = sum(takes), []
    bounds = [sum(takes[:shard]) for shard in range(len(takes) + 1)]
    micro = -(-size // cut.micro_batch_size)
    for replica in range(cut.replicas):
        spans = [
            (index * cut.micro_batch_size, min((index + 1) * cut.micro_batch_size, size))
            for index in assign_microbatches(micro, replica=replica, replicas=cut.replicas)
        ]
        found.append(
            frozenset(
                shard
                for shard in range(len(takes))
                if any(max(start, bounds[shard]) < min(stop, bounds[shard + 1]) for start, stop in spans)
            )
        )
    return found


def _differs(shard: int, rank: int, other: int) -> DataError:
    return DataError(
        f"shard {shard} of the stream gives different samples on rank {other} and rank {rank}.",
        cause=f"{NOT_SEEDED}, or not on every rank",
        hint=f"{SEED_IT}; {EVERY_RANK}",
    )


def _shorter(shard: int) -> DataError:
    return DataError(
        f"shard {shard} of the stream has fewer samples than at the first read.", cause=NOT_SEEDED, hint=SEED_IT
    )
