"""Assignment of a stream's samples to batches by virtual shard: a function of batch size and shard lengths only.

A global batch is divided into as many blocks as there are shards that still have samples; block k comes from the k-th
of these shards. The result does not depend on the number of ranks or the microbatch size. If a shard has fewer samples
than its block, the other shards fill the block, so that every batch of an epoch except the last is full.
"""

from collections.abc import Sequence

from paceline.errors import UsageError

MOST_SHARDS = 16


def choose_shards(*, asked: int | None, real: int | None, global_batch_size: int) -> int:
    """Return the number of virtual shards: as many as the data has, at most 16 and at most one per sample of a batch.

    The number does not depend on the number of ranks, because the order of samples depends on it. One means that the
    stream is not split, as if more are requested than the data has (`num_real`; None if it can have any number).

    Raises:
        UsageError: more shards than samples in a global batch, or fewer than one.
    """
    if asked is None:
        return min(MOST_SHARDS, global_batch_size, real or MOST_SHARDS)
    if not 1 <= asked <= global_batch_size:
        raise UsageError(
            f"data.shards is {asked}, expected 1 to {global_batch_size}.",
            cause="each shard gives at least one sample to every global batch",
            hint=f"--data.shards {max(1, min(asked, global_batch_size))}",
        )
    return asked if real is None or asked <= real else 1


def block_sizes(size: int, parts: int) -> list[int]:
    """Return the sizes of `parts` nearly equal pieces of `size`."""
    return [(k + 1) * size // parts - k * size // parts for k in range(parts)]


def samples_per_shard(*, have: Sequence[int], ended: Sequence[bool], size: int) -> list[int] | None:
    """Return how many samples each shard gives to the next batch of `size`.

    `available` counts the samples that were read ahead in each shard, and `ended` says that the shard has no more. The
    result is None if more must be read ahead first: it never depends on how far a replica has read ahead.
    """
    taken = [0] * len(have)
    while (num_missing := size - sum(taken)) > 0:
        needs_more = [h == t and not e for h, t, e in zip(have, taken, ended, strict=True)]
        if any(needs_more):
            return None
        live_shards = [shard for shard in range(len(have)) if have[shard] > taken[shard]]
        if not live_shards:
            break
        for shard, share in zip(live_shards, block_sizes(num_missing, len(live_shards)), strict=True):
            remaining = have[shard] - taken[shard]
            if remaining < share and not ended[shard]:
                return None
            taken[shard] += min(share, remaining)
    return taken
