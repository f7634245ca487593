"""A single pass over a stream, for evaluation: each sample goes to exactly one replica.

The microbatches are the same for any number of replicas. A microbatch consists of consecutive samples of one shard, so
replicas need not communicate.
"""

from collections.abc import Iterator

from paceline.data.order.virtual_shards import MAX_SHARDS
from paceline.data.source import Source
from paceline.data.stream.microbatch_collator import Collator
from paceline.data.stream.shard_buffer import ShardBuffer
from paceline.data.stream.shard_reader import ShardPosition
from paceline.data.stream.shard_workers import InProcessShards, ShardRequest, WorkerShards
from paceline.data.stream.virtual_sharding import StreamSharding, decide_sharding
from paceline.data.types import ReplicaMicrobatch


def read_stream_once(
    *, source: Source, batch_size: int, replica: int, replicas: int, seed: int, totals: dict[str, list[int]]
) -> Iterator[ReplicaMicrobatch]:
    """Yield this replica's microbatches.

    `totals` receives the sample count and checksum of each shard that this replica reads, by the number of the shard.
    """
    sharding = decide_sharding(source, requested=None, global_batch_size=MAX_SHARDS)
    local_shards = [
        shard for shard in range(sharding.shards) if replica in reading_replicas(shard, sharding.shards, replicas)
    ]
    pool, collator = _open_pool(sharding, local_shards, source, batch_size, seed), Collator(source)
    try:
        buffers = {shard: ShardBuffer(shard=shard, pool=pool) for shard in local_shards}
        round_number = 0
        while buffers:
            for shard in list(buffers):
                buffer = buffers[shard]
                start = buffer.num_read
                samples = buffer.take(batch_size)
                readers = reading_replicas(shard, sharding.shards, replicas)
                if samples and readers[round_number % len(readers)] == replica:
                    yield collator.collate_microbatch(
                        samples, index=round_number * sharding.shards + shard, start=start
                    )
                if len(samples) < batch_size:
                    totals[str(shard)] = [buffer.num_read, buffer.checksum]
                    buffers.pop(shard)
            round_number += 1
    finally:
        pool.close()
        collator.close()


def reading_replicas(shard: int, shards: int, replicas: int) -> list[int]:
    """Return the replicas that read this shard. If there are several, they yield its microbatches in turn."""
    if replicas <= shards:
        return [shard % replicas]
    return list(range(shard, replicas, shards))


def _open_pool(
    sharding: StreamSharding, shards: list[int], source: Source, batch_size: int, seed: int
) -> InProcessShards | WorkerShards:
    requests = [
        ShardRequest(position=ShardPosition(shard=shard, epoch=0, seed=seed), chunk_size=batch_size) for shard in shards
    ]
    if source.workers and requests:
        return WorkerShards(sharding=sharding, requests=requests, source=source)
    return InProcessShards(sharding=sharding, requests=requests)
