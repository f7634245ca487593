"""The job in the precision of a comparison, with its model placed as the plan says."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.comm.process_group import World
from paceline.job import Job
from paceline.torch_internals.pytree import map_tensors
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.optimizers import make_scaler
from paceline.trainer.setup.prepare import PreparedJob
from paceline.verification.precision_cast import as_type, in_type

LOSS_SCALE = 1024.0


def cast_to(dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """Return a function that casts floating tensors of a batch to this type, and complex ones to its complex type."""

    return _as_it_is if dtype is None else lambda batch: map_tensors(batch, lambda tensor: as_type(tensor, dtype))


def job_in(job: Job, dtype: torch.dtype | None) -> Job:
    """Return the job with its model in this precision, and also its loss if that is a module (class weights)."""
    if dtype is None:
        return job
    loss = in_type(deepcopy(job.loss), dtype) if isinstance(job.loss, nn.Module) else job.loss
    return replace(job, model=lambda: in_type(job.model(), dtype), loss=loss)


def build_in_precision(
    ready: PreparedJob, world: World, dtype: torch.dtype | None, *, scale: float = LOSS_SCALE
) -> TrainingSetup:
    """Return this rank's share of the run in this precision; `scale` is the fp16 loss scale."""
    settings = ready.settings
    job = job_in(ready.job, dtype)
    if dtype is not None:
        job = replace(job, collate=_casting(job, cast_to(dtype)))
        settings = replace(settings, train=replace(settings.train, precision="fp32"))
    built = build_training_setup(job=job, settings=settings, plan=ready.plan, world=world)
    built.refuse_training()
    if built.update.scaler is not None:  # a low constant scale: after an overflow there is nothing to compare
        options = {"init_scale": scale, "growth_interval": 1 << 30}
        built.update.scaler = make_scaler(built.kept, world, **options)
    return built


def _casting(job: Job, cast: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    collate = job.collate or getattr(job.train_data, "collate_fn", None) or torch.utils.data.default_collate
    return lambda rows: cast(collate(rows))


def _as_it_is(value: Any) -> Any:
    return value
