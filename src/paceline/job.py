"""A job: plain Python values that say what to train. The user writes it; nothing here touches a device."""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from paceline.errors import JobError, PacelineError, raise_all
from paceline.spec.jobref import JobRef

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when `metric` has not improved by more than `min_delta` in `patience` evaluations."""

    metric: str
    mode: Literal["min", "max"] = "min"
    patience: int = 3
    min_delta: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train.

    `model` builds an `nn.Module`; `loss(output, batch)` gives `(loss_sum, count)`, a dict of named
    `(sum, count)` terms, or a scalar mean over the samples of the microbatch; left out, the model's own
    `output.loss` is used. `optimizer` maps a list of `(name, parameter)` to an optimizer or a list of them.
    """

    model: Callable[[], nn.Module]
    train_data: Any
    optimizer: Callable[[NamedParameters], Optimizer | list[Optimizer]]
    global_batch_size: int
    loss: Callable[[Any, Any], Any] | None = None
    eval_data: Any = None
    test_data: Any = None
    lr_schedule: Callable[[Optimizer], Any] | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    metrics: Mapping[str, Any] | None = None
    count: Callable[[Any], Any] | None = None
    loss_over: Literal["samples", "batch"] = "samples"
    order: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    sequence: Mapping[str, int] | None = None
    micro_batch_size: int | None = None
    max_grad_norm: float | None = None
    ema: float | None = None
    best: str | None = None
    early_stopping: EarlyStopping | int | None = None
    on_eval: Callable[[Any], Mapping[str, Any] | None] | None = None
    on_update: Callable[[nn.Module, int], object] | None = None
    settings: Mapping[str, Any] | None = None
    name: str | None = None


def load_job(ref: JobRef, *, params: Mapping[str, Any]) -> Job:
    """Import what `ref` names and return its job; a function is called with `params`."""
    module = imported(ref)
    found = _pick(ref, module)
    if isinstance(found, Job):
        if params:
            raise JobError(
                f"{ref} is a finished Job and takes no parameters, got {', '.join(sorted(params))}.",
                hint="define make_job(...) with these parameters",
            )
        return _checked(ref, found)
    if not callable(found):
        raise JobError(f"{ref} is a {type(found).__name__}, expected a paceline.Job or a function giving one.")
    made = found(**_accepted(ref, found, params))
    if not isinstance(made, Job):
        raise JobError(
            f"{ref} gave a {type(made).__name__}, expected a paceline.Job.",
            where=str(ref),
            hint="return pl.Job(model=..., train_data=..., optimizer=..., global_batch_size=...)",
        )
    return _checked(ref, made)


def job_parameters(factory: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of `make_job` and their defaults."""
    return {name: p.default for name, p in inspect.signature(factory).parameters.items()}


def imported(ref: JobRef) -> ModuleType:
    """The module or the file that `ref` names."""
    if ref.path is None:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(str(ref.module))
    path = Path(ref.path).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is not a Python file.", hint="paceline new text")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _pick(ref: JobRef, module: ModuleType) -> Any:
    names = [ref.name] if ref.name else ["make_job", "job"]
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise JobError(
        f"{ref} has no {' or '.join(names)}.",
        where=str(getattr(module, "__file__", ref)),
        hint="define make_job() -> pl.Job, or name the object: job.py:name",
    )


def _accepted(ref: JobRef, factory: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    known = job_parameters(factory)
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise JobError(
            f"{ref} has no parameter {', '.join(unknown)}.",
            hint=f"it takes: {', '.join(known) or 'none'}",
        )
    return {name: _like(name, known[name], value) for name, value in params.items()}


def _like(name: str, default: Any, value: Any) -> Any:
    """A value from the command line (text) in the type of the parameter's default."""
    if not isinstance(value, str) or default is inspect.Parameter.empty or isinstance(default, str):
        return value
    try:
        if isinstance(default, bool):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        return type(default)(value) if isinstance(default, int | float) else value
    except (ValueError, KeyError):
        raise JobError(
            f"--job.{name}={value} is no {type(default).__name__}.", hint=f"--job.{name}={default}"
        ) from None


def _checked(ref: JobRef, job: Job) -> Job:
    refuse_job(job, where=str(ref))
    return job


def refuse_job(job: Job, *, where: str) -> None:
    """Refuse values that no job can have.

    Raises:
        JobError, Problems: with all of them.
    """
    problems: list[PacelineError] = []
    if type(job.global_batch_size) is not int or job.global_batch_size < 1:
        problems.append(
            JobError(
                f"global_batch_size={job.global_batch_size!r} is no count of samples.",
                hint="global_batch_size=64: 1 or more",
            )
        )
    if job.train_data is None:
        problems.append(JobError("train_data is None.", hint="give a dataset with __len__ and __getitem__"))
    for name in ("model", "optimizer"):
        if not callable(getattr(job, name)):
            problems.append(JobError(f"{name} is not callable.", hint=f"{name}=lambda ...: ..."))
    if job.loss_over not in ("samples", "batch"):
        problems.append(JobError(f"loss_over={job.loss_over!r} is not known.", hint='loss_over="samples" or "batch"'))
    if job.ema is not None and not 0.0 < job.ema < 1.0:
        problems.append(JobError(f"ema={job.ema} is no decay between 0 and 1.", hint="ema=0.999"))
    problems += _unheard_rule(job.early_stopping)
    for problem in problems:
        problem.where = problem.where or where
    raise_all(problems)


def no_loss(batch: Any) -> JobError:
    """The error of a job without loss= whose model gave none either."""
    unlabelled = isinstance(batch, Mapping) and "labels" not in batch
    return JobError(
        "the job has no loss=, and the model's output has no .loss.",
        cause=f"the rows have no `labels` (they have {', '.join(map(str, batch))})" if unlabelled else "",
        hint=("rows with `labels`, or " if unlabelled else "") + "loss=lambda output, batch: (loss_sum, count)",
    )


def _unheard_rule(rule: EarlyStopping | int | None) -> list[PacelineError]:
    """What is wrong with a rule to stop early."""
    if rule is None:
        return []
    patience = rule.patience if isinstance(rule, EarlyStopping) else rule
    found: list[PacelineError] = []
    if type(patience) is not int or patience < 1:
        found.append(
            JobError(
                f"early_stopping={rule!r}: the patience is no count of evaluations.",
                hint="early_stopping=3: 1 or more; leave it out to train to the end",
            )
        )
    if isinstance(rule, EarlyStopping) and rule.mode not in ("min", "max"):
        found.append(JobError(f"early_stopping={rule!r}: mode is not known.", hint='mode="min" or "max"'))
    if isinstance(rule, EarlyStopping) and not 0.0 <= rule.min_delta < math.inf:
        found.append(JobError(f"early_stopping={rule!r}: min_delta is no amount.", hint="min_delta=0.0 or more"))
    return found
