"""The batches and microbatches in flight in a pipeline without flush, and gradient sums over a stage's replicas."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.step.loss.loss_return_value import Terms
from paceline.step.microbatches import StepBatch
from paceline.step.replica_context import LocalMicrobatch
from paceline.step.step_totals import StepResult, TotalsReduction

Counts = dict[str, Tensor] | None
"""The global counts by loss term, or None if they are not known before the forward."""


@dataclass(kw_only=True)
class InFlightBatch:
    """A batch between its first forward and its update.

    `number` is the batch's step, counted from zero. `num_left` is the number of microbatches that the last stage has
    not run yet. `terms` has the loss terms by microbatch index.
    """

    number: int
    step_batch: StepBatch
    counts: Counts
    num_left: int
    reduction: TotalsReduction | None = None
    result: StepResult | None = None
    terms: dict[int, Terms] = field(default_factory=dict)


@dataclass(kw_only=True)
class InFlightMicrobatch:
    """A microbatch of a batch in flight, until this stage runs its forward. `num_samples` 0 means weight zero."""

    batch: InFlightBatch
    index: int
    num_samples: int
    local_microbatch: LocalMicrobatch


def sum_over_replicas(parameters: Sequence[nn.Parameter], *, world: World) -> None:
    """Sum every `.grad` over replicas. If no replica has a gradient for a parameter, its `.grad` stays None."""
    if world.world_size == 1:
        return
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], device=world.device)
    world.all_reduce(has_gradient)
    with_gradient = [p for p, num_replicas in zip(parameters, has_gradient.tolist(), strict=True) if num_replicas]
    for _, group in groupby(sorted(with_gradient, key=_dtype_name), key=_dtype_name):
        members = list(group)
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in members])
        world.all_reduce(flat)
        for parameter, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
            parameter.grad = part.view_as(parameter)


def _dtype_name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype)
