"""Optional statistics of each parameter: the norms of its weight and gradient, by FQN."""

import math

import torch
from torch import Tensor

from paceline.trainer.setup.build_training_setup import TrainingSetup


def statistics(built: TrainingSetup) -> dict[str, float]:
    """Return `weight_norm/FQN`, and `grad_norm/FQN` if there is a gradient, of whole tensors. A collective call."""
    if not built.kept.is_whole:
        return _joint(built)
    found: dict[str, float] = {}
    for member in built.named:
        found[f"weight_norm/{member.name}"] = float(torch.linalg.vector_norm(member.parameter.detach()))
        if member.parameter.grad is not None:
            found[f"grad_norm/{member.name}"] = float(torch.linalg.vector_norm(member.parameter.grad))
    return found


def _joint(built: TrainingSetup) -> dict[str, float]:
    """Return the norms of sharded parameters by an all-reduce in which each element is counted by one rank."""
    kept, mine = built.kept, {member.name: member.parameter for member in built.named}
    rows = torch.zeros(len(kept.names), 3, dtype=torch.float64)
    for row, name in zip(rows, kept.names, strict=True):
        if name in mine and kept.owns(name):
            row[0], gradient = _square(mine[name].detach()), mine[name].grad
            if gradient is not None:
                row[1], row[2] = _square(gradient), 1.0
    sums = built.world.all_reduce(rows.to(built.world.device)).tolist()
    found: dict[str, float] = {}
    for name, (weight, gradient, present) in zip(kept.names, sums, strict=True):
        found[f"weight_norm/{name}"] = math.sqrt(weight)
        if present:
            found[f"grad_norm/{name}"] = math.sqrt(gradient)
    return found


def _square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()
