"""Shard ownership: which part of a tensor a rank writes, and how it reads its shard from another layout's shards."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.tensor_bytes import from_bytes, lazy_tensor
from paceline.parallel.module_access.shard_spec import Box, ShardSpec


def owned_boxes(shard_specs: Sequence[ShardSpec], rank: int) -> list[Box]:
    """Return the boxes that this rank writes. If several ranks hold a box, the first of them writes it."""
    assigned: set[tuple[object, object]] = set()
    owned: list[Box] = []
    for spec in shard_specs[: rank + 1]:
        owned = [box for box in spec.boxes if (box.full_offset, box.size) not in assigned]
        assigned |= {(box.full_offset, box.size) for box in spec.boxes}
    return owned


def writer_rank(shard_specs: Sequence[ShardSpec]) -> int:
    """Return the first rank that holds elements of the tensor; 0 for a tensor without elements."""
    return next((rank for rank, spec in enumerate(shard_specs) if spec.boxes), 0)


def owned_shards(
    name: str, *, dtype: torch.dtype, get_tensor: Callable[[], Tensor], shard_specs: Sequence[ShardSpec], rank: int
) -> list[Writable]:
    """Return the shards of a tensor that this rank writes; `get_tensor` returns the local tensor at write time.

    Each element is written by exactly one rank: the first that holds it.
    """
    shape = shard_specs[rank].shape
    if not math.prod(shape):
        return (
            [lazy_tensor(name, dtype=dtype, shape=shape, get_tensor=lambda: torch.empty(shape, dtype=dtype))]
            if not rank
            else []
        )
    return [
        lazy_tensor(
            name,
            dtype=dtype,
            shape=box.size,
            get_tensor=lambda box=box: box.view_local(get_tensor()),  # type: ignore[misc]
            at=None if box.size == shape else box.full_offset,
            whole=None if box.size == shape else shape,
        )
        for box in owned_boxes(shard_specs, rank)
    ]


def read_shard(stored: StoredTensors, name: str, *, shard: ShardSpec) -> Tensor:
    """Return this rank's shard of a stored tensor.

    Raises:
        CheckpointError: stored bytes do not match their digest.
    """
    assert shard.local_shape is not None
    boxes = [(box.full_offset, box.local_offset, box.size) for box in shard.boxes]
    return from_bytes(stored.read_boxes(name, shape=shard.local_shape, boxes=boxes))
