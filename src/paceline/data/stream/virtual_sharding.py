"""Virtual shards of a stream: whether and how the stream is split."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.data.fetch import raise_worker_error, worker_error
from paceline.data.order.virtual_shards import choose_shards
from paceline.data.source import Source
from paceline.errors import JobError


@dataclass(frozen=True, kw_only=True)
class StreamSharding:
    """A stream that is split into `shards` virtual shards. `reason_not_split` says why there is only one shard.

    `has_state`: the dataset has `shard`, `state_dict` and `load_state_dict`, so that a resume can restore each shard.
    """

    data: Any
    shards: int = 1
    has_state: bool = False
    reason_not_split: str = ""

    def open_shard(self, *, shard: int, epoch: int) -> Any:
        """Return the dataset of one shard for this epoch; the whole dataset if it can't be split."""
        _set_epoch(self.data, epoch)
        if not self.has_state:
            return self.data
        doing = f"shard(num_shards={self.shards}, index={shard})"
        shard_data = call_user_dataset(lambda: self.data.shard(num_shards=self.shards, index=shard), doing=doing)
        if not hasattr(shard_data, "__iter__"):
            raise JobError(f"{doing} of the stream returned a {type(shard_data).__name__}, expected an iterable.")
        _set_epoch(shard_data, epoch)
        return shard_data


def decide_sharding(source: Source, *, requested: int | None, global_batch_size: int) -> StreamSharding:
    """Return how this stream is split, which depends only on the data, the batch size and the requested number.

    Raises:
        JobError: the stream has no shard.
        UsageError: the requested number of shards is impossible.
    """
    data, num_real = source.data, num_real_shards(source.data)
    if num_real == 0 and hasattr(data, "shard"):
        raise JobError("the stream has no shard.", where=type(data).__name__, hint="check the path it reads from")
    shards = choose_shards(requested=requested, num_real=num_real, global_batch_size=global_batch_size)
    missing = [name for name in ("shard", "state_dict", "load_state_dict") if not hasattr(data, name)]
    if missing:
        return StreamSharding(data=data, reason_not_split=f"it has no {missing[0]}()")
    if requested is not None and num_real is not None and requested > num_real:
        reason = f"it has {num_real} shard{'s' if num_real > 1 else ''} and data.shards is {requested}"
        return StreamSharding(data=data, has_state=True, reason_not_split=reason)
    if shards == 1:
        reason = (
            "data.shards is 1" if requested == 1 else "it has one shard" if num_real == 1 else "a batch is one sample"
        )
        return StreamSharding(data=data, has_state=True, reason_not_split=reason)
    return StreamSharding(data=data, shards=shards, has_state=True)


def num_real_shards(data: Any) -> int | None:
    """Return the number of shards that the data reports. None means that it can be split into any number of shards."""
    for name in ("num_shards", "n_shards"):
        value = getattr(data, name, None)
        if isinstance(value, int):
            return value
    return None


def call_user_dataset(call: Callable[[], Any], *, doing: str) -> Any:
    """Return the result of `call`, which runs code of the user's dataset.

    Raises:
        DataError: the call raised an exception; the message names the line of the user's code.
    """
    try:
        return call()
    except Exception as error:
        return raise_worker_error(worker_error(error, doing=doing))


def _set_epoch(data: Any, epoch: int) -> None:
    if hasattr(data, "set_epoch"):
        call_user_dataset(lambda: data.set_epoch(epoch), doing=f"set_epoch({epoch})")
