"""Gather tensors from all ranks as whole tensors, one set for each copy that the layout keeps."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.verification.tensor_distance import euclidean_distance


def gather_all_copies(
    mine: Mapping[str, Tensor], *, holding: ShardedTensors, world: World, names: Sequence[str] | None = None
) -> list[dict[str, Tensor]]:
    """Return the whole tensors of every copy, valid on rank 0. Only copies that differ from the first are sent.

    A tensor that its holders lack (a gradient that did not come) is absent from their copy.
    """
    told = world.gather_json(tensor_digests(mine))
    names = holding.names if names is None else names
    most = max((len(holding.copies(name)) for name in names), default=0)
    found: list[dict[str, Tensor]] = [{} for _ in range(max(most, 1))]
    for name in names:
        copies = holding.copies(name)
        seen = [[told[rank].get(name) for rank in ranks] for ranks in copies]
        for number, parts in enumerate(found):
            copy = number if number < len(copies) else 0
            if any(digest is None for digest in seen[copy]):
                continue
            if number and seen[copy] == seen[0] and name in found[0]:
                parts[name] = found[0][name]
            elif len({digest for digests in seen for digest in digests}) == 1 and len(copies) == world.world_size:
                parts[name] = mine[name]  # every rank holds the same whole tensor
            else:
                parts[name] = holding.whole(name, mine.get(name), copy=copy)
    return found


def differing_parts(
    mine: Mapping[str, Tensor], right: Mapping[str, Tensor], *, holding: ShardedTensors, world: World
) -> dict[str, dict[int, float]]:
    """Return by name how far each rank's part is from rank 0's whole tensors `right`, where any bit differs."""
    found: dict[str, dict[int, float]] = {}
    for name in holding.names:
        whole = broadcast_tensor(name, right.get(name), holding=holding, world=world)
        same = whole is None or (name in mine and digest(mine[name]) == digest(whole))
        far = None if same or whole is None else euclidean_distance(mine[name], whole) if name in mine else math.inf
        for rank, size in enumerate(world.gather_json(far)):
            if size is not None:
                found.setdefault(name, {})[rank] = size
    return found


def broadcast_tensor(name: str, whole: Tensor | None, *, holding: ShardedTensors, world: World) -> Tensor | None:
    """Broadcast rank 0's whole tensor; each rank keeps its own part."""
    held = holding.mine[name]
    sent = whole.detach().to(world.device, held.dtype).contiguous() if whole is not None else None
    if sent is None:
        sent = torch.empty(held.part.shape, dtype=held.dtype, device=world.device)
    return holding.take(name, world.broadcast(sent))


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor's bytes, by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def digest(tensor: Tensor) -> str:
    """Return the BLAKE2b digest of the tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
