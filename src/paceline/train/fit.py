"""What a job can't bring: found before the first step, each by name, all at once."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.errors import CheckpointError, JobError, PacelineError, raise_all
from paceline.job import Job
from paceline.train.apart import extra_state, tensors_of
from paceline.train.convert import DTYPES, first_names
from paceline.train.state import make_optimizers


def refuse_unfit(job: Job, model: nn.Module, *, takes_sparse: bool = False) -> None:
    """Refuse a model that can't be trained, sent or saved; the optimizer is made only to tell all in that case.

    Raises:
        JobError, Problems: with everything that is wrong.
    """
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise JobError(
            f"the model has parameters that get their shape in the first forward only: {first_names(lazy)}.",
            cause="nn.LazyLinear and its like; the optimizer and the other ranks need the parameters before",
            hint="nn.Linear(in_features, ...), or one forward on a sample inside model=",
        )
    problems = [*_complex(model), *([] if takes_sparse else _sparse(model)), *_unsaved(model)]
    if problems:
        with suppress(Exception):
            optimizers = make_optimizers(job, model)
            problems += unfit_optimizers(optimizers)
            problems += unfit_schedules([job.lr_schedule(o) for o in optimizers] if job.lr_schedule else [])
        raise_all(problems)


def unfit_optimizers(optimizers: Sequence[Optimizer]) -> list[PacelineError]:
    """Optimizers that want to call the loss themselves."""
    return [
        JobError(
            f"optimizer= gave {type(optimizer).__name__}, whose step() needs a closure.",
            cause="it calls the loss several times in one step; a step here has one forward and backward",
            hint="torch.optim.AdamW, SGD or another that steps from the gradient",
        )
        for optimizer in optimizers
        if "closure" in _required(optimizer)
    ]


def unfit_schedules(schedules: Sequence[Any]) -> list[PacelineError]:
    """Schedules that want to be told something."""
    return [
        JobError(
            f"lr_schedule= gave {type(schedule).__name__}, whose step() needs {', '.join(_required(schedule))}.",
            cause="a schedule is moved once a step, by the number of the step alone",
            hint="lr_schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps); "
            "early_stopping=3 ends a run at a plateau",
        )
        for schedule in schedules
        if _required(schedule)
    ]


def _required(thing: Any) -> list[str]:
    """The arguments without which its `step` can't be called."""
    parameters = inspect.signature(thing.step).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _complex(model: nn.Module) -> list[PacelineError]:
    names = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if not names:
        return []
    return [
        JobError(
            f"the model has complex parameters: {first_names(names)}.",
            cause="sums over ranks, clipping and the proof are for real numbers",
            hint="a real parameter with a last axis of 2, and torch.view_as_complex(parameter) in the forward",
        )
    ]


def _sparse(model: nn.Module) -> list[PacelineError]:
    names = [name or type(module).__name__ for name, module in model.named_modules() if _gives_sparse(module)]
    if not names:
        return []
    return [
        JobError(
            f"the model gives sparse gradients: {first_names(names)}.",
            cause="sparse=True; only --update ps takes rows of a gradient, all else takes it whole",
            hint="nn.Embedding(..., sparse=False), or --update ps",
        )
    ]


def _gives_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad


def _unsaved(model: nn.Module) -> list[PacelineError]:
    """What a checkpoint could not hold is found now, not at the first save."""
    known = set(DTYPES.values())
    found: list[PacelineError] = [
        JobError(
            f"{name} of the model has the type {tensor.dtype}, which can't be saved.",
            hint="another type, or register_buffer(..., persistent=False) where it is made again by the model",
        )
        for name, tensor in tensors_of(model).items()
        if tensor.dtype not in known and not (isinstance(tensor, nn.Parameter) and tensor.is_complex())
    ]
    try:
        extra_state(model)
    except CheckpointError as error:
        found.append(JobError(error.what, cause=error.cause, hint=error.hint))
    return found
