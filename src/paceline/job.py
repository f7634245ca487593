"""A job: a description of what to train, in plain Python values. The user writes the job. A job uses no device."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from paceline.config.job_reference import JobRef
from paceline.errors import JobError, PacelineError, list_problems, raise_all
from paceline.job_field_checks import mode_of_metric, unfit_fields, unknown_fields
from paceline.job_parameters import missing_parameters, typed_parameters
from paceline.torch_internals.scalars import as_integer, as_number
from paceline.user_code import is_user_file, script_arguments

_EXAMPLE_FACTORY = "def make_job() -> pl.Job: return pl.Job(...)"

_REQUIRED: Any = None  # the default of required fields; a missing one is reported with all other problems

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when `metric` has not improved by more than `min_delta` in `patience` evaluations.

    Without `mode`, lower is better; a metric with a name such as accuracy or f1 requires a mode.
    """

    metric: str
    mode: Literal["min", "max"] | None = None
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        """Convert numbers of any type to Python's own, and determine the mode.

        Raises:
            JobError: the mode of a metric such as accuracy is missing.
        """
        _convert_numbers(self, counts=("patience",), numbers=("min_delta",))
        if self.mode is None:
            rule_text = f"EarlyStopping(metric={self.metric!r})"
            hint = f'EarlyStopping(metric={self.metric!r}, mode="max")'
            object.__setattr__(self, "mode", mode_of_metric(self.metric, rule_text=rule_text, hint=hint))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A description of what to train.

    `model` builds an `nn.Module`. `loss(output, batch)` returns `(loss_sum, count)`, a dict of named `(sum, count)`
    terms, or a scalar mean over the samples of the microbatch. Without `loss`, the model's own `output.loss` is used.
    `optimizer` gets a list of `(name, parameter)` and returns an optimizer or a list of optimizers.

    `count(batch)` returns the `count` that `loss` will return, or a dict with the count of each term. It is called
    before the forward, so that the loss can be divided by the count before the backward. This is needed under fp16 and
    for several loss terms.

    `loss_over="batch"` is for a loss that compares samples with each other. Such a loss is computed over the whole
    batch, instead of over each microbatch. `sequence` says, for the layout `cp`, which dimension of an entry of the
    batch is the sequence, as in `{"input_ids": 1}`. The documentation explains every field (docs/job.md).
    """

    model: Callable[[], nn.Module] = _REQUIRED
    train_data: Any = _REQUIRED
    optimizer: Callable[[NamedParameters], Optimizer | list[Optimizer]] = _REQUIRED
    global_batch_size: int = _REQUIRED
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

    def __new__(cls, *args: Any, **kwargs: Any) -> "Job":
        """Check that all arguments are fields. If one is not, report it together with all other errors of the job.

        Raises:
            JobError, Problems: an argument is not a field.
        """
        if cls.__init__ is not Job.__init__:  # a subclass with its own arguments, which sets the fields
            return super().__new__(cls)
        defaults = {field.name: field.default for field in fields(cls)}
        problems: list[PacelineError] = [*unknown_fields(args, kwargs, defaults)]
        if problems:
            problems += unfit_fields(SimpleNamespace(**{**defaults, **kwargs}))
            raise_all(problems)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Convert numbers of any type to Python's own."""
        counts = ("global_batch_size", "micro_batch_size", "early_stopping")
        _convert_numbers(self, counts=counts, numbers=("max_grad_norm", "ema"))


def _convert_numbers(owner: Any, *, counts: Sequence[str], numbers: Sequence[str]) -> None:
    """Replace NumPy numbers and tensors of one element by Python's own numbers."""
    for names, convert in ((counts, as_integer), (numbers, as_number)):
        for name in names:
            number = convert(getattr(owner, name))
            if number is not None:
                object.__setattr__(owner, name, number)


def load_job(ref: JobRef, *, params: Mapping[str, Any]) -> Job:
    """Import and return the job that `ref` names. If `ref` names a function, call it with `params` to get the job."""
    with script_arguments(str(ref.path or ref.module)):
        return _load_job(ref, params)


def _load_job(ref: JobRef, params: Mapping[str, Any]) -> Job:
    module = import_job_module(ref)
    target = _find_target(ref, module)
    if isinstance(target, Job):
        if params:
            raise JobError(
                f"{ref} is a finished Job and takes no parameters, got {', '.join(sorted(params))}.",
                hint="define make_job(...) with these parameters",
            )
        return _check_job(ref, target)
    if not callable(target):
        raise JobError(
            f"{ref} is a {type(target).__name__}, expected a paceline.Job or a function that returns one.",
            where=str(ref),
            hint=_EXAMPLE_FACTORY,
        )
    job = target(**_factory_arguments(ref, target, params))
    if inspect.iscoroutine(job):
        job.close()
        raise JobError(
            f"{ref} is async and returned a coroutine, expected a paceline.Job.",
            where=str(ref),
            hint=f"no async: {_EXAMPLE_FACTORY}",
        )
    if not isinstance(job, Job):
        raise JobError(
            f"{ref} returned a {type(job).__name__}, expected a paceline.Job.",
            where=str(ref),
            cause="its return statement is missing" if job is None else "",
            hint="return pl.Job(model=..., train_data=..., optimizer=..., global_batch_size=...)",
        )
    return _check_job(ref, job)


def job_parameters(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of `make_job` and their defaults."""
    return {name: p.default for name, p in inspect.signature(factory).parameters.items()}


def import_job_module(ref: JobRef) -> ModuleType:
    """Import and return the module or the file that `ref` names."""
    if ref.path is None:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(str(ref.module))
    path = Path(ref.path).resolve()
    is_name_taken = _is_name_taken(path)  # a job file random.py or torch.py must not replace that module
    name = f"{path.stem}_job" if is_name_taken else path.stem
    if str(path.parent) not in sys.path:
        sys.path.insert(len(sys.path) if is_name_taken else 0, str(path.parent))
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{path} is not a Python file.", hint="paceline new text")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_name_taken(path: Path) -> bool:
    """Return whether Python, Paceline or an installed package has a module with the name of this file."""
    if path.stem in sys.stdlib_module_names:
        return True
    if not path.stem.isidentifier():
        return False
    loaded_module = sys.modules.get(path.stem)
    spec = importlib.util.find_spec(path.stem) if loaded_module is None else None
    origin = spec.origin if spec is not None else getattr(loaded_module, "__file__", None)
    return origin is not None and not is_user_file(origin) and Path(origin).resolve() != path


def _find_target(ref: JobRef, module: ModuleType) -> Any:
    names = [ref.name] if ref.name else ["make_job", "job"]
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise JobError(
        f"{ref} has no {' or '.join(names)}.",
        where=str(getattr(module, "__file__", ref)),
        hint="define make_job() -> pl.Job, or name the object: job.py:name",
    )


def _factory_arguments(ref: JobRef, factory: Callable[..., Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for the factory.

    Raises:
        JobError, Problems: parameters are unknown or missing, or values have the wrong type; all are reported.
    """
    parameters = job_parameters(factory)
    unknown = sorted(set(params) - set(parameters))
    problems: list[PacelineError] = []
    if unknown:
        problems.append(
            JobError(
                f"{ref} has no parameter {', '.join(unknown)}.",
                hint=f"it takes: {', '.join(parameters) or 'none'}",
            )
        )
    problems += missing_parameters(factory, params)
    arguments: dict[str, Any] = {}
    try:
        arguments = typed_parameters(factory, {name: params[name] for name in params if name in parameters})
    except PacelineError as error:
        problems += list_problems(error)
    raise_all(problems)
    return arguments


def _check_job(ref: JobRef, job: Job) -> Job:
    refuse_job(job, where=str(ref))
    return job


def refuse_job(job: Job, *, where: str) -> None:
    """Raise an error if a field of the job has an invalid value. `where` is the job's origin, for the message.

    Raises:
        JobError, Problems: fields are invalid; all are reported.
    """
    problems = list(unfit_fields(job))
    for problem in problems:
        problem.where = problem.where or where
    raise_all(problems)


def missing_loss_error(batch: Any) -> JobError:
    """Return the error for a job without `loss=` whose model returned no loss either."""
    unlabelled = isinstance(batch, Mapping) and "labels" not in batch
    return JobError(
        "the job has no loss=, and the model's output has no .loss.",
        cause=f"the rows have no `labels` (they have {', '.join(map(str, batch))})" if unlabelled else "",
        hint=("rows with `labels`, or " if unlabelled else "") + "loss=lambda output, batch: (loss_sum, count)",
    )
