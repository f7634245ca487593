"""Optional statistics of each parameter: the norms of its weight and gradient, by FQN."""

import math

import torch
from torch import Tensor

from paceline.trainer.setup.build_training_setup import TrainingSetup


def parameter_statistics(setup: TrainingSetup) -> dict[str, float]:
    """Return `weight_norm/FQN`, and `grad_norm/FQN` if there is a gradient, of full tensors. Every rank calls this."""
    if not setup.optim_shards.is_unsharded:
        return _sharded_statistics(setup)
    norms: dict[str, float] = {}
    for member in setup.named_parameters:
        norms[f"weight_norm/{member.name}"] = float(torch.linalg.vector_norm(member.parameter.detach()))
        if member.parameter.grad is not None:
            norms[f"grad_norm/{member.name}"] = float(torch.linalg.vector_norm(member.parameter.grad))
    return norms


def _sharded_statistics(setup: TrainingSetup) -> dict[str, float]:
    """Return the norms of sharded parameters, from an all-reduce to which one rank contributes each element."""
    shards, parameters = setup.optim_shards, {member.name: member.parameter for member in setup.named_parameters}
    rows = torch.zeros(len(shards.names), 3, dtype=torch.float64)
    for row, name in zip(rows, shards.names, strict=True):
        if name in parameters and shards.owns(name):
            row[0], gradient = _squared_norm(parameters[name].detach()), parameters[name].grad
            if gradient is not None:
                row[1], row[2] = _squared_norm(gradient), 1.0
    sums = setup.world.all_reduce(rows.to(setup.world.device)).tolist()
    norms: dict[str, float] = {}
    for name, (weight, gradient, has_gradient) in zip(shards.names, sums, strict=True):
        norms[f"weight_norm/{name}"] = math.sqrt(weight)
        if has_gradient:
            norms[f"grad_norm/{name}"] = math.sqrt(gradient)
    return norms


def _squared_norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()
