"""Checks of a job's model, optimizers and LR schedulers before the first step. One error lists all found problems."""

import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.checkpoint.state_outside_state_dict import get_extra_state, state_dict_tensors
from paceline.checkpoint.tensor_bytes import DTYPES
from paceline.checkpoint.train_state import create_optimizers
from paceline.console.formatting import first_names
from paceline.errors import CheckpointError, JobError, PacelineError, raise_all
from paceline.job import Job
from paceline.torch_internals.scalars import as_number

_WRAPPERS = {
    "DistributedDataParallel": "--layout ddp",
    "FullyShardedDataParallel": "--layout fsdp",
    "FSDPModule": "--layout fsdp",
    "DataParallel": "--layout threads",
}


def check_job(job: Job, model: nn.Module, *, takes_sparse: bool = False) -> None:
    """Refuse a model that cannot be trained, sent to other ranks or saved. `takes_sparse` permits sparse gradients.

    If the model is refused, the optimizers and LR schedulers are checked too, so that one error has all problems. But a
    model with lazy parameters is refused without any other check.

    Raises:
        JobError, Problems: the model is refused.
    """
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise JobError(
            f"the model has parameters that get their shape only in the first forward: {first_names(lazy)}.",
            cause="nn.LazyLinear or similar; the optimizer and the other ranks need the parameters earlier",
            hint="nn.Linear(in_features, ...), or one forward on a sample inside model=",
        )
    problems = [
        *_find_wrapper(model),
        *_find_complex_parameters(model),
        *([] if takes_sparse else _find_sparse_gradients(model)),
        *_find_unsavable_state(model),
    ]
    if problems:
        with suppress(Exception):
            optimizers = create_optimizers(job, model)
            problems += unfit_optimizers(optimizers)
            problems += unfit_lr_schedulers(
                [job.lr_schedule(o) for o in optimizers] if job.lr_schedule else [], optimizers
            )
        raise_all(problems)


def unfit_optimizers(optimizers: Sequence[Optimizer]) -> list[PacelineError]:
    """Return errors for NaN options, for infinite learning rates, and for optimizers whose `step` needs a closure."""
    option_problems: list[PacelineError] = [
        JobError(
            f"optimizer= returned {type(optimizer).__name__} with {key}={number} in group {index}.",
            cause="a division by zero or an overflow in its computation",
            hint=f"{key}=a finite number",
        )
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for key, number in ((key, as_number(value)) for key, value in group.items() if not _is_on_device(value))
        if number is not None and (math.isnan(number) or (key == "lr" and math.isinf(number)))
    ]
    return option_problems + [
        JobError(
            f"optimizer= returned {type(optimizer).__name__}, whose step() needs a closure.",
            cause="it evaluates the loss several times per step; a step here has one forward and backward",
            hint="torch.optim.AdamW, SGD or another that steps from the gradient",
        )
        for optimizer in optimizers
        if "closure" in _required_step_arguments(optimizer)
    ]


def unfit_lr_schedulers(lr_schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> list[PacelineError]:
    """Return errors for LR schedulers that control another optimizer, can't be saved, or need arguments for `step`."""
    interface_problems: list[PacelineError] = [
        JobError(
            f"lr_schedule= returned a {type(schedule).__name__}, expected a schedule with step() and state_dict().",
            hint="lr_schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps)",
        )
        for schedule in lr_schedulers
        if not all(hasattr(schedule, name) for name in ("step", "state_dict", "load_state_dict"))
    ]
    optimizer_mismatches: list[PacelineError] = [
        JobError(
            f"lr_schedule= was given one optimizer, but its {type(schedule).__name__} controls another one.",
            cause="the schedule was built from a fixed optimizer, but each run makes a new optimizer with optimizer=",
            hint="lr_schedule=lambda optimizer: ...(optimizer, ...): use the argument",
        )
        for schedule, optimizer in zip(lr_schedulers, optimizers, strict=False)
        if getattr(schedule, "optimizer", optimizer) is not optimizer
    ]
    lr_schedulers = [] if interface_problems else lr_schedulers
    return [*interface_problems, *optimizer_mismatches] + [
        JobError(
            f"lr_schedule= returned {type(schedule).__name__}, "
            f"whose step() needs {', '.join(_required_step_arguments(schedule))}.",
            cause="a schedule is stepped once per step, without arguments",
            hint="lr_schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps); "
            "early_stopping=3 ends a run at a plateau",
        )
        for schedule in lr_schedulers
        if _required_step_arguments(schedule)
    ]


def _required_step_arguments(optimizer_or_scheduler: Any) -> list[str]:
    """Return the arguments that `step` of this object requires."""
    parameters = inspect.signature(optimizer_or_scheduler.step).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _is_on_device(value: Any) -> bool:
    """Return True if reading the value would wait for a device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _find_wrapper(model: nn.Module) -> list[PacelineError]:
    """Return an error if another tool has already made the model parallel."""
    for name, module in model.named_modules():
        kind = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)
        if kind is not None:
            return [
                JobError(
                    f"model= returned {f'{name} in a' if name else 'a'} {kind}.",
                    cause="the wrapper would reduce gradients, or shard parameters, a second time",
                    hint=f"model= without {kind}; {_WRAPPERS[kind]}",
                )
            ]
    return []


def _find_complex_parameters(model: nn.Module) -> list[PacelineError]:
    names = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if not names:
        return []
    return [
        JobError(
            f"the model has complex parameters: {first_names(names)}.",
            cause="reductions, clipping and verification are for real numbers",
            hint="use a real parameter with a last dimension of 2, and torch.view_as_complex(parameter) in the forward",
        )
    ]


def _find_sparse_gradients(model: nn.Module) -> list[PacelineError]:
    names = [name or type(module).__name__ for name, module in model.named_modules() if _gives_sparse(module)]
    if not names:
        return []
    return [
        JobError(
            f"the model gives sparse gradients: {first_names(names)}.",
            cause="sparse=True; only --update ps takes sparse gradients",
            hint="nn.Embedding(..., sparse=False), or --update ps",
        )
    ]


def _gives_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad


def _find_unsavable_state(model: nn.Module) -> list[PacelineError]:
    """Return errors for everything that a checkpoint cannot hold, before the first save."""
    supported_dtypes = set(DTYPES.values())
    problems: list[PacelineError] = [
        JobError(
            f"{name} of the model has the type {tensor.dtype}, which can't be saved.",
            hint="another dtype, or register_buffer(..., persistent=False) if the model recreates it",
        )
        for name, tensor in state_dict_tensors(model).items()
        if tensor.dtype not in supported_dtypes and not (isinstance(tensor, nn.Parameter) and tensor.is_complex())
    ]
    try:
        get_extra_state(model)
    except CheckpointError as error:
        problems.append(JobError(error.what, cause=error.cause, hint=error.hint))
    return problems
