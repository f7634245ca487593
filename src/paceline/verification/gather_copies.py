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
    """Return the full tensors of every copy, valid on rank 0. Only copies that differ from the first are sent.

    A tensor that is missing on its ranks (a parameter without a gradient) is absent from their copy.
    """
    digests_by_rank = world.gather_json(digest_tensors(local_tensors))
    names = sharded.names if names is None else names
    num_copies = max((len(sharded.copy_ranks(name)) for name in names), default=0)
    gathered: list[dict[str, Tensor]] = [{} for _ in range(max(num_copies, 1))]
    for name in names:
        copies = sharded.copy_ranks(name)
        digests_by_copy = [[digests_by_rank[rank].get(name) for rank in ranks] for ranks in copies]
        for number, parts in enumerate(gathered):
            copy = number if number < len(copies) else 0
            if any(digest is None for digest in digests_by_copy[copy]):
                continue
            if number and digests_by_copy[copy] == digests_by_copy[0] and name in gathered[0]:
                parts[name] = gathered[0][name]
            elif (
                len({digest for digests in digests_by_copy for digest in digests}) == 1
                and len(copies) == world.world_size
            ):
                parts[name] = local_tensors[name]  # every rank holds the same full tensor
            else:
                parts[name] = sharded.gather_full_tensor(name, local_tensors.get(name), copy=copy)
    return gathered


def part_distances(
    local_tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, sharded: ShardedTensors, world: World
) -> dict[str, dict[int, float]]:
    """Return the distance of each rank's part from rank 0's full tensor, by name and rank, where any bit differs."""
    distances: dict[str, dict[int, float]] = {}
    for name in sharded.names:
        expected_part = broadcast_full_tensor(name, expected.get(name), sharded=sharded, world=world)
        same = expected_part is None or (
            name in local_tensors and digest_tensor(local_tensors[name]) == digest_tensor(expected_part)
        )
        distance = (
            None
            if same or expected_part is None
            else euclidean_distance(local_tensors[name], expected_part)
            if name in local_tensors
            else math.inf
        )
        for rank, size in enumerate(world.gather_json(distance)):
            if size is not None:
                distances.setdefault(name, {})[rank] = size
    return distances


def broadcast_full_tensor(
    name: str, full_tensor: Tensor | None, *, sharded: ShardedTensors, world: World
) -> Tensor | None:
    """Broadcast rank 0's full tensor, and return this rank's part of it."""
    local = sharded.local_tensors[name]
    sent = full_tensor.detach().to(world.device, local.dtype).contiguous() if full_tensor is not None else None
    if sent is None:
        sent = torch.empty(local.shard_spec.shape, dtype=local.dtype, device=world.device)
    return sharded.extract_shard(name, world.broadcast(sent))


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor's bytes, by name."""
    return {name: digest_tensor(tensor) for name, tensor in tensors.items()}


def digest_tensor(tensor: Tensor) -> str:
    """Return the BLAKE2b digest of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
