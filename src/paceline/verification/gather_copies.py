"""Gather tensors from all ranks as full tensors, one set for each copy of the model in the layout."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.verification.tensor_distance import euclidean_distance


def gather_copies(
    local_tensors: Mapping[str, Tensor], *, sharded: ShardedTensors, world: World, names: Sequence[str] | None = None
) -> list[dict[str, Tensor]]:
    """Return the full tensors of every copy, valid on rank 0.

    A later copy of a tensor is not sent if it equals the first copy.

    If a rank of a copy lacks a tensor (such as the gradient of a frozen parameter), the copy omits this tensor.
    """
    digests_by_rank = world.gather_json(digest_tensors(local_tensors))
    names = sharded.names if names is None else names
    num_copies = max((len(sharded.copy_ranks(name)) for name in names), default=0)
    gathered: list[dict[str, Tensor]] = [{} for _ in range(max(num_copies, 1))]
    for name in names:
        ranks_by_copy = sharded.copy_ranks(name)
        digests_by_copy = [[digests_by_rank[rank].get(name) for rank in ranks] for ranks in ranks_by_copy]
        for number, full_tensors in enumerate(gathered):
            copy = number if number < len(ranks_by_copy) else 0  # a tensor with fewer copies: its first copy
            if any(digest is None for digest in digests_by_copy[copy]):
                continue
            if number and digests_by_copy[copy] == digests_by_copy[0] and name in gathered[0]:
                full_tensors[name] = gathered[0][name]
            elif (
                len({digest for digests in digests_by_copy for digest in digests}) == 1
                and len(ranks_by_copy) == world.world_size
            ):
                full_tensors[name] = local_tensors[name]  # every rank holds the same full tensor
            else:
                full_tensors[name] = sharded.gather_full_tensor(name, local_tensors.get(name), copy=copy)
    return gathered


def shard_distances(
    local_tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, sharded: ShardedTensors, world: World
) -> dict[str, dict[int, float]]:
    """Return how far each rank's shard is from the expected shard, by tensor name and rank; equal shards are omitted.

    `expected` has full tensors, and is read on rank 0 only.
    """
    distances: dict[str, dict[int, float]] = {}
    for name in sharded.names:
        expected_shard = distribute_full_tensor(name, expected.get(name), sharded=sharded, world=world)
        is_same = expected_shard is None or (
            name in local_tensors and digest_tensor(local_tensors[name]) == digest_tensor(expected_shard)
        )
        distance = (
            None
            if is_same or expected_shard is None
            else euclidean_distance(local_tensors[name], expected_shard)
            if name in local_tensors
            else math.inf
        )
        for rank, rank_distance in enumerate(world.gather_json(distance)):
            if rank_distance is not None:
                distances.setdefault(name, {})[rank] = rank_distance
    return distances


def distribute_full_tensor(
    name: str, full_tensor: Tensor | None, *, sharded: ShardedTensors, world: World
) -> Tensor | None:
    """Broadcast rank 0's full tensor, and return this rank's shard of it."""
    local = sharded.local_tensors[name]
    broadcast_tensor = (
        full_tensor.detach().to(world.device, local.dtype).contiguous() if full_tensor is not None else None
    )
    if broadcast_tensor is None:
        broadcast_tensor = torch.empty(local.shard_spec.shape, dtype=local.dtype, device=world.device)
    return sharded.extract_shard(name, world.broadcast(broadcast_tensor))


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor's bytes, by name."""
    return {name: digest_tensor(tensor) for name, tensor in tensors.items()}


def digest_tensor(tensor: Tensor) -> str:
    """Return the BLAKE2b digest of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
