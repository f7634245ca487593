"""The job in a precision of the comparison's own, and its model placed as the plan says."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.job import Job
from paceline.nested import mapped
from paceline.train.built import Built, build
from paceline.train.ready import Ready
from paceline.train.updates import make_scaler
from paceline.world import World

LOSS_SCALE = 1024.0


def cast_to(dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """A function that gives every floating tensor of a batch this type."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _as_it_is if dtype is None else lambda batch: mapped(batch, cast)


def job_in(job: Job, dtype: torch.dtype | None) -> Job:
    """The job with its model in this precision."""
    return job if dtype is None else replace(job, model=lambda: job.model().to(dtype))


def built_in(ready: Ready, world: World, dtype: torch.dtype | None) -> Built:
    """This rank's share of it."""
    settings = ready.settings
    job = job_in(ready.job, dtype)
    if dtype is not None:
        job = replace(job, collate=_casting(job, cast_to(dtype)))
        settings = replace(settings, train=replace(settings.train, precision="fp32"))
    built = build(job=job, settings=settings, plan=ready.plan, world=world)
    if built.update.scaler is not None:  # one scale for all steps, and low: an overflow would leave nothing to compare
        options = {"init_scale": LOSS_SCALE, "growth_interval": 1 << 30}
        built.update.scaler = make_scaler(built.kept, world, **options)
    return built


def _casting(job: Job, cast: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
    collate = job.collate or getattr(job.train_data, "collate_fn", None) or torch.utils.data.default_collate
    return lambda rows: cast(collate(rows))


def _as_it_is(value: Any) -> Any:
    return value
