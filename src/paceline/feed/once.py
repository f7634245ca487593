"""One pass over a stream, for evaluation: each sample on exactly one replica, in the same microbatches for any
number of them. Nothing is agreed on: a microbatch holds consecutive samples of one shard."""

from collections.abc import Iterator

from paceline.feed.collator import Collator
from paceline.feed.held import Held
from paceline.feed.pool import Aside, Here, Wish
from paceline.feed.reader import Stand
from paceline.feed.source import Source
from paceline.feed.split import Split, split_of
from paceline.feed.types import LocalMicro
from paceline.order.shards import MOST_SHARDS


def stream_once(
    *, source: Source, batch_size: int, replica: int, replicas: int, seed: int, totals: dict[str, list[int]]
) -> Iterator[LocalMicro]:
    """This replica's microbatches; `totals` gets samples and checksum of every shard that it has read."""
    split = split_of(source, asked=None, global_batch_size=MOST_SHARDS)
    mine = [shard for shard in range(split.shards) if replica in readers(shard, split.shards, replicas)]
    pool, collator = _pool(split, mine, source, batch_size, seed), Collator(source)
    try:
        held = {shard: Held(shard=shard, pool=pool) for shard in mine}
        number = 0
        while held:
            for shard in list(held):
                part = held[shard]
                start = part.read
                rows = part.take(batch_size)
                sharers = readers(shard, split.shards, replicas)
                if rows and sharers[number % len(sharers)] == replica:
                    yield collator.microbatch(rows, index=number * split.shards + shard, start=start)
                if len(rows) < batch_size:
                    totals[str(shard)] = [part.read, part.checksum]
                    held.pop(shard)
            number += 1
    finally:
        pool.close()
        collator.close()


def readers(shard: int, shards: int, replicas: int) -> list[int]:
    """The replicas that read this shard, in turn where they are several."""
    if replicas <= shards:
        return [shard % replicas]
    return list(range(shard, replicas, shards))


def _pool(split: Split, shards: list[int], source: Source, batch_size: int, seed: int) -> Here | Aside:
    wishes = [Wish(stand=Stand(shard=shard, epoch=0, seed=seed), portion=batch_size) for shard in shards]
    if source.workers and wishes:
        return Aside(split=split, wishes=wishes, source=source)
    return Here(split=split, wishes=wishes)
