"""Assignment of a stream's samples to batches by virtual shard: a function of batch size and shard lengths only.

A global batch is divided into as many blocks as there are shards that still have samples; block k comes from the k-th
of these shards. The result does not depend on the number of ranks or the microbatch size. If a shard has fewer samples
than its block, the other shards fill the block, so that every batch of an epoch except the last is full.
"""

from collections.abc import Sequence

from paceline.errors import UsageError

MAX_SHARDS = 16


def choose_shards(*, requested: int | None, num_real: int | None, global_batch_size: int) -> int:
    """Return the number of virtual shards of a stream.

    `num_real` is the number of shards of the data, or None if the data can be cut into any number. If `requested` is
    None, the result is the smallest of `num_real`, 16 and the global batch size. Otherwise, the result is `requested`.
    But if `requested` is larger than `num_real`, the result is 1, and the stream is not split. The result decides the
    order of samples, so it does not depend on the number of ranks.

    Raises:
        UsageError: `requested` is less than 1, or larger than the global batch.
    """
    if requested is None:
        return min(MAX_SHARDS, global_batch_size, num_real or MAX_SHARDS)
    if not 1 <= requested <= global_batch_size:
        raise UsageError(
            f"data.shards is {requested}, expected 1 to {global_batch_size}.",
            cause="each shard gives at least one sample to every global batch",
            hint=f"--data.shards {max(1, min(requested, global_batch_size))}",
        )
    return requested if num_real is None or requested <= num_real else 1


def block_sizes(size: int, num_blocks: int) -> list[int]:
    """Return the sizes of `num_blocks` nearly equal blocks that add up to `size`."""
    return [(k + 1) * size // num_blocks - k * size // num_blocks for k in range(num_blocks)]


def samples_per_shard(*, available: Sequence[int], ended: Sequence[bool], size: int) -> list[int] | None:
    """Return how many samples each shard gives to the next batch of `size`.

    `available` counts the samples of each shard that were read ahead, and `ended` is True for a shard that has no more.
    Return None if more samples must be read ahead first. Otherwise, the result does not depend on how far a replica has
    read ahead.
    """
    taken = [0] * len(available)
    while (num_missing := size - sum(taken)) > 0:
        must_read_ahead = [
            num_available == num_taken and not has_ended
            for num_available, num_taken, has_ended in zip(available, taken, ended, strict=True)
        ]
        if any(must_read_ahead):
            return None
        live_shards = [shard for shard in range(len(available)) if available[shard] > taken[shard]]
        if not live_shards:
            break
        for shard, share in zip(live_shards, block_sizes(num_missing, len(live_shards)), strict=True):
            remaining = available[shard] - taken[shard]
            if remaining < share and not ended[shard]:
                return None
            taken[shard] += min(share, remaining)
    return taken
