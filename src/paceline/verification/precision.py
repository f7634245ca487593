"""Build a job, and this rank's training setup for it, in the precision of a comparison."""

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
from paceline.verification.precision_cast import cast_model, cast_tensor

LOSS_SCALE = 1024.0  # of fp16, and low: after an overflow there is nothing to compare


def make_cast(dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """Return a function that casts the floating and complex tensors of a batch to this precision; None: no cast."""
    return _identity if dtype is None else lambda batch: map_tensors(batch, lambda tensor: cast_tensor(tensor, dtype))


def cast_job(job: Job, dtype: torch.dtype | None) -> Job:
    """Return the job with its model in this precision. A loss module is cast too, as it may hold class weights."""
    if dtype is None:
        return job
    loss = cast_model(deepcopy(job.loss), dtype) if isinstance(job.loss, nn.Module) else job.loss
    return replace(job, model=lambda: cast_model(job.model(), dtype), loss=loss)


def build_in_precision(
    prepared_job: PreparedJob, world: World, dtype: torch.dtype | None, *, loss_scale: float = LOSS_SCALE
) -> TrainingSetup:
    """Build this rank's training setup in this precision (None: the job's own); `loss_scale` is for fp16."""
    settings = prepared_job.settings
    job = cast_job(prepared_job.job, dtype)
    if dtype is not None:
        job = replace(job, collate=_cast_collated(job, make_cast(dtype)))
        settings = replace(settings, train=replace(settings.train, precision="fp32"))
    setup = build_training_setup(job=job, settings=settings, plan=prepared_job.plan, world=world)
    setup.check_trainable()
    if setup.update.scaler is not None:
        options = {"init_scale": loss_scale, "growth_interval": 1 << 30}
        setup.update.scaler = make_scaler(setup.optim_shards, world, **options)
    return setup


def _cast_collated(job: Job, cast: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    collate = job.collate or getattr(job.train_data, "collate_fn", None) or torch.utils.data.default_collate
    return lambda samples: cast(collate(samples))


def _identity(value: Any) -> Any:
    return value
