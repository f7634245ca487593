"""Which bytes of a tensor this rank writes, and how it gets its own out of whatever pieces there are."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.tensor_bytes import from_bytes, lazy_tensor
from paceline.parallel.module_access.shard_spec import Box, ShardSpec


def own_boxes(parts: Sequence[ShardSpec], rank: int) -> list[Box]:
    """The boxes that this rank speaks for: a box that several hold is the first one's."""
    seen: set[tuple[object, object]] = set()
    mine: list[Box] = []
    for part in parts[: rank + 1]:
        mine = [box for box in part.boxes if (box.whole, box.size) not in seen]
        seen |= {(box.whole, box.size) for box in part.boxes}
    return mine


def writer_rank(parts: Sequence[ShardSpec]) -> int:
    """The first rank that holds anything of it; what has no element is rank 0's."""
    return next((rank for rank, part in enumerate(parts) if part.boxes), 0)


def owned_shards(
    name: str, *, dtype: torch.dtype, find: Callable[[], Tensor], parts: Sequence[ShardSpec], rank: int
) -> list[Writable]:
    """What this rank writes of a tensor; `find` gives its local part when it is written.

    Every element is some rank's, and only one's: what several hold is written by the first.
    """
    shape = parts[rank].shape
    if not math.prod(shape):
        return (
            [lazy_tensor(name, dtype=dtype, shape=shape, find=lambda: torch.empty(shape, dtype=dtype))]
            if not rank
            else []
        )
    return [
        lazy_tensor(
            name,
            dtype=dtype,
            shape=box.size,
            find=lambda box=box: box.of_local(find()),  # type: ignore[misc]
            at=None if box.size == shape else box.whole,
            whole=None if box.size == shape else shape,
        )
        for box in own_boxes(parts, rank)
    ]


def read_part(stored: StoredTensors, name: str, *, part: ShardSpec) -> Tensor:
    """This rank's part of a stored tensor.

    Raises:
        CheckpointError: a piece of it is not what was written.
    """
    assert part.local is not None
    boxes = [(box.whole, box.local, box.size) for box in part.boxes]
    return from_bytes(stored.part(name, shape=part.local, boxes=boxes))
