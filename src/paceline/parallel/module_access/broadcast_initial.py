"""Broadcast of rank 0's initial weights and buffers, after a check that all ranks have built the same model."""

import hashlib

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import DesyncError
from paceline.parallel.module_access.tensor_access import copy_into


def broadcast_initial(model: nn.Module, *, world: World) -> list[str]:
    """Broadcast rank 0's weights and buffers; return the names of the tensors that differed on this rank.

    Raises:
        DesyncError: the ranks' models have different parameters; a broadcast would mix them up or hang.
    """
    _check_structure(model, world)
    differed = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        mine = tensor.detach().clone(memory_format=torch.contiguous_format)  # an expanded tensor shares memory
        theirs = world.broadcast(mine.clone())
        if not _same_bits(mine, theirs):
            copy_into(tensor.data, theirs)
            differed.append(name)
    return differed


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in every bit: a NaN equals itself, and 0.0 differs from -0.0."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _check_structure(model: nn.Module, world: World) -> None:
    """Raise DesyncError unless names, shapes, dtypes and trainability are the same on every rank."""
    if world.world_size == 1:
        return
    mine = {name: _kind(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    digests = world.gather_json(hashlib.blake2b(repr(list(mine.items())).encode(), digest_size=16).hexdigest())
    if len(set(digests)) == 1:
        return
    everybody = world.gather_json(mine)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, other = everybody[0], everybody[rank]
    name = next((n for n in {**first, **other} if first.get(n) != other.get(n)), None)
    differs = (
        f"{name} is {other.get(name, 'absent')} on rank {rank} and {first.get(name, 'absent')} on rank 0"
        if name is not None
        else f"rank {rank} has the same parameters as rank 0 in a different order"
    )
    raise DesyncError(
        f"the ranks have built different models: {differs}.",
        cause="code that builds, ties or freezes layers on some ranks only, or in a different order",
        hint="build the same model on every rank; Paceline gives all of them rank 0's initial weights",
    )


def _kind(tensor: Tensor) -> str:
    trains = ", trainable" if tensor.requires_grad else ", not trainable" if isinstance(tensor, nn.Parameter) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{trains}"
