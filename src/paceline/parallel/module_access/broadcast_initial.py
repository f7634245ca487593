"""Broadcast rank 0's initial weights and buffers, after a check that all ranks have built the same model."""

import hashlib

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import DesyncError
from paceline.parallel.module_access.tensor_access import copy_into


def broadcast_initial_tensors(model: nn.Module, *, world: World) -> list[str]:
    """Broadcast rank 0's weights and buffers; return the names of the tensors that differed on this rank.

    Raises:
        DesyncError: the ranks' models have different parameters; a broadcast would mix parameters up or hang.
    """
    _check_structure(model, world)
    changed_names = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        # the elements of an expanded tensor share memory
        local_value = tensor.detach().clone(memory_format=torch.contiguous_format)
        received_value = world.broadcast(local_value.clone())
        if not _is_bitwise_equal(local_value, received_value):
            copy_into(tensor.data, received_value)
            changed_names.append(name)
    return changed_names


def _is_bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal in every bit: a NaN equals itself, and 0.0 differs from -0.0."""
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def _check_structure(model: nn.Module, world: World) -> None:
    """Raise DesyncError if names, shapes, dtypes or trainability differ between ranks."""
    if world.world_size == 1:
        return
    local_structure = {
        name: _describe_tensor(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    digests = world.gather_json(
        hashlib.blake2b(repr(list(local_structure.items())).encode(), digest_size=16).hexdigest()
    )
    if len(set(digests)) == 1:
        return
    structures = world.gather_json(local_structure)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first_structure, other_structure = structures[0], structures[rank]
    name = next(
        (n for n in {**first_structure, **other_structure} if first_structure.get(n) != other_structure.get(n)), None
    )
    difference = (
        f"{name} is {other_structure.get(name, 'absent')} on rank {rank} and "
        f"{first_structure.get(name, 'absent')} on rank 0"
        if name is not None
        else f"rank {rank} has the same parameters as rank 0 in a different order"
    )
    raise DesyncError(
        f"the ranks have built different models: {difference}.",
        cause="code that builds, ties or freezes layers on some ranks only, or in a different order",
        hint="build the same model on every rank; Paceline gives all of them rank 0's initial weights",
    )


def _describe_tensor(tensor: Tensor) -> str:
    trainability = (
        ", trainable" if tensor.requires_grad else ", not trainable" if isinstance(tensor, nn.Parameter) else ""
    )
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{trainability}"
