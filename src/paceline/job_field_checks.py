"""Checks of a job's fields: each error names an invalid field and the line to write instead."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from paceline.console.formatting import did_you_mean
from paceline.errors import JobError, PacelineError
from paceline.torch_internals.scalars import as_integer

_MODEL = "model=lambda: MyModel()"
_OPTIMIZER = "optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3)"
_LOSS = "loss=lambda output, batch: (loss_sum, count)"
_CALLABLE_FIELDS = {  # with the hint of the error
    "model": _MODEL,
    "optimizer": _OPTIMIZER,
    "loss": _LOSS,
    "lr_schedule": "lr_schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)",
    "forward": "forward=lambda model, batch: model(batch[0])",
    "count": "count=lambda batch: len(batch[1])",
    "collate": "collate=lambda samples: ...",
    "on_update": "on_update=lambda model, step: ...",
    "on_eval": 'on_eval=lambda run: {"bleu": score}',
}
_REQUIRED_FIELDS = {  # with the hint of the error
    "model": _MODEL,
    "train_data": "train_data=dataset",
    "optimizer": _OPTIMIZER,
    "global_batch_size": "global_batch_size=64",
}
_BATCH_SIZES = ("batch_size", "train_batch_size", "batch")
_ARRAYS = (Tensor, np.ndarray)
_HIGHER_IS_BETTER = {  # words in the names of metrics
    "acc", "accuracy", "ap", "auc", "auprc", "auroc", "bleu", "chrf", "correct", "dice", "f", "hits", "iou", "kappa",
    "map", "mcc", "meteor", "miou", "mrr", "ndcg", "precision", "psnr", "r", "recall", "rouge", "sensitivity",
    "specificity", "ssim", "top",
}  # fmt: skip
_LOWER_IS_BETTER = {"err", "error", "errors", "loss", "losses"}


def mode_of_metric(metric: str, *, rule_text: str, hint: str) -> Literal["min", "max"]:
    """Return "min", which is the mode of a metric unless the user gives a mode.

    `rule_text` is what the user wrote, for the error.

    Raises:
        JobError: the metric's name implies that higher is better.
    """
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", metric)
    words = {*re.findall(r"[a-z]+", metric.lower()), *re.findall(r"[a-z]+", spaced.lower())}
    if words & _LOWER_IS_BETTER or _HIGHER_IS_BETTER.isdisjoint(words):
        return "min"
    raise JobError(
        f"{rule_text} would take the lowest {metric} for the best.",
        cause="a metric without a mode is better the lower it is, as a loss is",
        hint=f"{hint}; or min, if lower is better",
    )


def unknown_fields(
    args: Sequence[Any], kwargs: Mapping[str, Any], known_fields: Mapping[str, Any]
) -> Iterator[JobError]:
    """Yield an error for each argument of a job that is not one of its `known_fields`."""
    if args:
        what = f"pl.Job got {len(args)} of its fields without {'its name' if len(args) == 1 else 'their names'}."
        yield JobError(what, hint="pl.Job(model=..., loss=..., train_data=..., optimizer=..., global_batch_size=...)")
    for name in kwargs:
        if name not in known_fields:
            suggestion = (
                "did you mean 'global_batch_size'?" if name in _BATCH_SIZES else did_you_mean(name, known_fields)
            )
            yield JobError(f"a job has no field {name!r}.", cause=suggestion, hint=f"one of {', '.join(known_fields)}")


def unfit_fields(job: Any) -> Iterator[PacelineError]:
    """Yield an error for each invalid field of a job, by name."""
    for name, hint in _REQUIRED_FIELDS.items():
        if getattr(job, name) is None:
            yield JobError(f"the job has no {name}=.", hint=hint)
    yield from _uncallable_fields(job)
    yield from _unfit_numbers(job)
    for name in ("train_data", "eval_data", "test_data"):
        if job.collate is None:
            yield from unfit_data(getattr(job, name), name=name)
    if job.loss_over not in ("samples", "batch"):
        yield JobError(f"loss_over={job.loss_over!r} is unknown.", hint='loss_over="samples" or "batch"')
    if job.best is not None and not isinstance(job.best, str):
        yield _wrong_type("best", job.best, "the name of a metric", 'best="accuracy:max"')
    yield from _unfit_metrics(job.metrics)
    yield from _unfit_order(job.order)
    for name, hint in (("settings", 'settings={"train.steps": 100}'), ("sequence", 'sequence={"input_ids": 1}')):
        value = getattr(job, name)
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            yield _wrong_type(name, value, "a dict with names as keys", hint)
    yield from _unfit_early_stopping(job.early_stopping)


def _uncallable_fields(job: Any) -> Iterator[PacelineError]:
    for name, hint in _CALLABLE_FIELDS.items():
        value = getattr(job, name)
        if value is None:
            continue
        kind = type(value).__name__
        if name == "model" and isinstance(value, nn.Module):
            yield JobError(
                f"model= is a {kind} that is already built, expected a function that builds it.",
                cause="every process builds its own model from the same seed, so that initial "
                "values are equal everywhere",
                hint=f"model=lambda: {kind}(...)",
            )
        elif isinstance(value, Optimizer | LRScheduler):
            yield JobError(
                f"{name}= is a {kind} that is already built, expected a function that builds it.",
                cause="the run calls this function after it has built the model and placed it on the ranks",
                hint=hint,
            )
        elif name == "loss" and isinstance(value, type) and issubclass(value, nn.Module):
            yield JobError(f"loss= is the class {value.__name__}, expected a function or a module object.", hint=hint)
        elif not callable(value):
            yield JobError(f"{name} is not callable: {name}={_shorten(value)}.", hint=hint)


def _unfit_numbers(job: Any) -> Iterator[PacelineError]:
    batch, micro, norm = job.global_batch_size, job.micro_batch_size, job.max_grad_norm
    if batch is not None and (type(batch) is not int or batch < 1):
        yield JobError(
            f"global_batch_size={_shorten(batch)} is not a number of samples.", hint="global_batch_size=64: 1 or more"
        )
    if micro is not None and type(micro) is not int:  # the setting checks the range
        yield JobError(f"micro_batch_size={_shorten(micro)} is not a number of samples.", hint="micro_batch_size=8")
    if norm is not None and not _is_number(norm):
        yield JobError(f"max_grad_norm={_shorten(norm)} is not a valid norm.", hint="max_grad_norm=1.0: above 0")
    if job.ema is not None and not (_is_number(job.ema) and 0.0 < job.ema < 1.0):
        yield JobError(f"ema={_shorten(job.ema)} is not a decay between 0 and 1.", hint="ema=0.999")


def unfit_data(data: Any, *, name: str) -> Iterator[JobError]:
    """Yield errors for data that can't be read by index as samples: a dict of splits, or a tuple (x, y) of columns.

    Arrays that have equal lengths but rows of different shapes or types are taken for columns. They can't be samples,
    because samples of different shapes or types could not be batched.
    """
    if isinstance(data, Mapping) and data and 0 not in data:
        keys = ", ".join(map(repr, list(data)[:6]))
        split = next((key for key in data if str(key) == name.partition("_")[0]), None)
        example = f"{name}=data[{split!r}]" if split is not None else f"{name}=[{{...}} for each sample]"
        yield JobError(
            f"{name} is a {type(data).__name__} with the keys {keys}, but samples are fetched by index.",
            hint=example,
        )
    if not isinstance(data, tuple | list) or not 2 <= len(data) <= 16 or not all(isinstance(x, _ARRAYS) for x in data):
        return
    shapes_and_dtypes = {(tuple(x.shape[1:]), str(x.dtype)) for x in data}
    lengths = {len(x) if x.ndim else 0 for x in data}
    if len(shapes_and_dtypes) > 1 and len(lengths) == 1 and max(lengths) > len(data):
        names = ", ".join("xyzw"[: len(data)]) if len(data) <= 4 else "*columns"
        columns = (
            names if isinstance(data[0], Tensor) else ", ".join(f"torch.as_tensor({n})" for n in names.split(", "))
        )
        yield JobError(
            f"{name} is a {type(data).__name__} of {len(data)} arrays of {max(lengths):,} rows: "
            f"that counts as {len(data)} samples.",
            cause="these are the columns of a dataset, not its samples",
            hint=f"{name}=torch.utils.data.TensorDataset({columns})",
        )


def _unfit_metrics(metrics: Any) -> Iterator[PacelineError]:
    hint = 'metrics={"accuracy": lambda output, batch: (correct.sum(), correct.numel())}'
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        yield _wrong_type("metrics", metrics, "a dict of functions by name", hint)
        return
    for name, metric in metrics.items():
        if isinstance(metric, type):
            yield JobError(
                f"metrics[{name!r}] is the class {metric.__name__}, not an object of it.",
                hint=f"metrics={{{name!r}: {metric.__name__}(...)}} if it has update() and compute(); otherwise {hint}",
            )
        elif not callable(metric) and not hasattr(metric, "compute"):
            yield JobError(f"metrics[{name!r}] is not callable: {_shorten(metric)}.", hint=hint)
        elif not hasattr(metric, "compute") and not _accepts_two_arguments(metric):
            yield JobError(
                f"metrics[{name!r}] can't be called with the output and the batch: it is {name}{signature(metric)}.",
                hint=hint,
            )


def _accepts_two_arguments(function: Any) -> bool:
    """Return whether the function accepts two arguments, as far as Python knows."""
    try:
        signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a function in C has no signature
        return True
    return True


def _unfit_order(order: Any) -> Iterator[PacelineError]:
    hint = 'order="sequential", a sampler, or a function (num_samples, epoch, seed) -> indices'
    if isinstance(order, str) and order != "sequential":
        yield JobError(f"order={order!r} is unknown.", hint=f"{hint}; leave it out to shuffle")
    elif not (order is None or isinstance(order, str | Sampler) or callable(order) or hasattr(order, "__iter__")):
        yield _wrong_type("order", order, "an order of samples", hint)


def _unfit_early_stopping(rule: Any) -> Iterator[PacelineError]:
    """Yield errors for an early-stopping rule: a number of evaluations, or an `EarlyStopping`."""
    if rule is None:
        return
    patience = getattr(rule, "patience", rule)
    if type(patience) is not int or patience < 1:
        yield JobError(
            f"early_stopping={rule!r}: the patience is not a number of evaluations.",
            hint="early_stopping=3: 1 or more; leave it out to train to the end",
        )
    if not hasattr(rule, "patience"):
        return
    if rule.mode not in ("min", "max"):
        yield JobError(f"early_stopping={rule!r}: mode is unknown.", hint='mode="min" or "max"')
    if not (_is_number(rule.min_delta) and 0.0 <= rule.min_delta < math.inf):
        yield JobError(f"early_stopping={rule!r}: min_delta is not a valid amount.", hint="min_delta=0.0 or more")


def integer_indices(order: Sequence[Any]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the sample indices of an order.

    Raises:
        JobError: an entry is not an integer.
    """
    indices = np.asarray(order)
    if indices.dtype.kind in "iu" or not len(order):
        return indices.astype(np.int64)
    for position, index in enumerate(order):
        if as_integer(index) is None:
            raise JobError(
                f"order= returned {_shorten(index)} at position {position}, expected the index of a sample.",
                hint="order=lambda num_samples, epoch, seed: [0, 1, ...]: integers",
            )
    return np.asarray([as_integer(index) for index in order], dtype=np.int64)


def _wrong_type(name: str, value: Any, expected: str, hint: str) -> JobError:
    return JobError(f"{name}={_shorten(value)} is a {type(value).__name__}, expected {expected}.", hint=hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
