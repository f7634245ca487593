"""One pass over a stream, for evaluation: each sample on exactly one replica, in the same microbatches for any
number of them. Nothing is agreed on: a microbatch holds consecutive samples of one shard."""

from collections.abc import Iterator

from paceline.data.order.virtual_shards import MOST_SHARDS
from paceline.data.source import Source
from paceline.data.stream.microbatch_collator import Collator
from paceline.data.stream.shard_buffer import ShardBuffer
from paceline.data.stream.shard_reader import ShardPosition
from paceline.data.stream.shard_workers import InProcessShards, ShardRequest, WorkerShards
from paceline.data.stream.virtual_sharding import StreamSharding, split_of
from paceline.data.types import LocalMicro


def stream_once(
    *, source: Source, batch_size: int, replica: int, replicas: int, seed: int, totals: dict[str, list[int]]
) -> Iterator[LocalMicro]:
    """This replica's microbatches; `totals` gets samples and checksum of every shard that it has read."""
    split = split_of(source, asked=None, global_batch_size=MOST_SHARDS)
    mine = [shard for shard in range(split.shards) if replica in reading_replicas(shard, split.shards, replicas)]
    pool, collator = _pool(split, mine, source, batch_size, seed), Collator(source)
    try:
        held = {shard: ShardBuffer(shard=shard, pool=pool) for shard in mine}
        number = 0
        while held:
            for shard in list(held):
                part = held[shard]
                start = part.read
                rows = part.take(batch_size)
                sharers = reading_replicas(shard, split.shards, replicas)
                if rows and sharers[number % len(sharers)] == replica:
                    yield collator.microbatch(rows, index=number * split.shards + shard, start=start)
                if len(rows) < batch_size:
                    totals[str(shard)] = [part.read, part.checksum]
                    held.pop(shard)
            number += 1
    finally:
        pool.close()
        collator.close()


def reading_replicas(shard: int, shards: int, replicas: int) -> list[int]:
    """The replicas that read this shard, in turn where they are several."""
    if replicas <= shards:
        return [shard % replicas]
    return list(range(shard, replicas, shards))


def _pool(
    split: StreamSharding, shards: list[int], source: Source, batch_size: int, seed: int
) -> InProcessShards | WorkerShards:
    wishes = [
        ShardRequest(stand=ShardPosition(shard=shard, epoch=0, seed=seed), portion=batch_size) for shard in shards
    ]
    if source.workers and wishes:
        return WorkerShards(split=split, wishes=wishes, source=source)
    return InProcessShards(split=split, wishes=wishes)
