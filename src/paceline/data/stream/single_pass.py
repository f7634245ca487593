"""A single pass over a stream, for evaluation: each sample goes to exactly one replica.

The microbatches are the same for any number of replicas. Replicas need not communicate: a microbatch holds consecutive
samples of one shard.
"""

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
    """Yield this replica's microbatches; `totals` receives the sample count and checksum of every shard it has read."""
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
    """Return the replicas that read this shard; if there are several, they alternate."""
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
