"""Checks of the requested evaluations and of batch sizes, and notes about them for the banner."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from paceline.config.settings import Settings
from paceline.console.formatting import did_you_mean, plural
from paceline.data.order.cursor import Cursor
from paceline.errors import JobError, PacelineError, UsageError, raise_all
from paceline.job import EarlyStopping, Job
from paceline.job_field_checks import mode_of_metric
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.trainer.setup.duration import Progress

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def early_stopping(job: Job) -> EarlyStopping | None:
    """Return the job's early-stopping rule, or None. A plain number in the job is the patience for `best`."""
    rule = job.early_stopping
    if not isinstance(rule, int):
        return rule
    metric, mode = best_rule(job)
    return EarlyStopping(metric=metric, mode="max" if mode == "max" else "min", patience=rule)


def best_rule(job: Job) -> tuple[str, str]:
    """Return the metric that decides which checkpoint is best, and its mode, `min` or `max`."""
    metric, _, mode = (job.best or "loss:min").partition(":")
    if mode not in ("", "min", "max") or not metric:
        raise JobError(f"best={job.best!r} is not understood.", hint='best="accuracy:max"')
    return metric, mode or mode_of_metric(metric, rule_text=f"best={job.best!r}", hint=f'best="{metric}:max"')


def check_evaluation_settings(job: Job, settings: Settings, *, evaluate_first: bool) -> None:
    """Refuse requests for evaluations without evaluation data, and rules on metrics that the job does not have.

    If the job has `loss=`, the names of its loss terms are not known yet. The rules on metrics are then checked by
    `refuse_unknown_metrics` when a step has returned the terms.

    Raises:
        JobError: a request or a rule is refused. The error names all refused requests.
    """
    if job.eval_data is None:
        requests = list(_requested_evaluations(job, settings, evaluate_first))
        if requests:
            raise JobError(
                f"{' and '.join(requests)} ask{'s' * (len(requests) == 1)} for evaluations, "
                "but the job has no eval_data=.",
                hint=f"pl.Job(..., eval_data=...), or leave {'it' if len(requests) == 1 else 'them'} out",
            )
    elif job.loss is None:
        refuse_unknown_metrics(job, terms=["loss"])


def refuse_unknown_metrics(job: Job, *, terms: Iterable[str]) -> None:
    """Refuse `best=` and `early_stopping=` if they name a metric that no evaluation returns.

    A job with `on_eval` is not checked, because the metrics that `on_eval` adds are not known in advance.

    Raises:
        JobError, Problems: a metric is refused; the error names the metrics that exist.
    """
    if job.eval_data is None or job.on_eval is not None:
        return
    losses = list(terms)
    metrics = job.metrics or {}
    known_metrics = [*metrics, *(losses if len(losses) == 1 else ["loss", *(f"loss/{name}" for name in losses)])]
    multi_value_prefixes = tuple(f"{name}/" for name, metric in metrics.items() if hasattr(metric, "compute"))
    problems: list[PacelineError] = [
        JobError(
            f"{request} needs the metric {metric!r}, which this job does not have.",
            cause=did_you_mean(metric, known_metrics),
            hint=f"one of {', '.join(known_metrics)}; or metrics={{{metric!r}: ...}}",
        )
        for request, metric in _metrics_in_rules(job)
        if metric not in known_metrics and not metric.startswith(multi_value_prefixes)
    ]
    raise_all(problems)


def job_choices(job: Job) -> dict[str, Any]:
    """Return the job's `ema`, `best` and `early_stopping` as text, for the records in the run folder."""
    choices = {"ema": job.ema, "best": job.best, "early_stopping": job.early_stopping}
    return {name: str(value) for name, value in choices.items() if value is not None}


def evaluation_notes(
    job: Job, settings: Settings, *, model: nn.Module, micro_batch_size: int, is_resumed: bool = False
) -> Iterator[str]:
    """Yield the banner's lines on batch norm, evaluations and EMA. A resumed run omits the line on batch norm."""
    train_settings = settings.train
    is_microbatch_fixed = is_resumed or train_settings.micro_batch_size or train_settings.gradient_accumulation_steps
    if (
        not is_microbatch_fixed
        and train_settings.buffers != "sync_bn"
        and any(isinstance(module, _BATCH_NORMS) for module in model.modules())
    ):
        yield (
            f"batch norm: over microbatches of {micro_batch_size}; this size changes the results, and depends on the "
            f"number of ranks at the first start; --train.micro_batch_size {micro_batch_size} sets the same size for "
            "any number of ranks"
        )
    if job.metrics and job.eval_data is None:
        yield "evaluate: never, because the job has metrics= but no eval_data="
    if job.ema is not None:
        yield f"ema: {job.ema:g}, evaluated and consolidated instead of the weights"


def refuse_large_batch(plan: ExecutionPlan, *, num_samples: int | None) -> None:
    """Refuse a global batch that is larger than an epoch.

    Raises:
        UsageError: the batch is refused; the error gives the number of samples.
    """
    batch = plan.global_batch_size
    if num_samples is not None and batch > num_samples:
        raise UsageError(
            f"global_batch_size={batch:,} is larger than the data, {plural(num_samples, 'sample')} an epoch.",
            cause="a batch never crosses an epoch, so no step would have that many samples",
            hint=f"global_batch_size={num_samples} or less in the job, or --train.global_batch_size {num_samples}",
        )


def last_batch_notes(
    plan: ExecutionPlan,
    settings: Settings,
    model: nn.Module,
    *,
    samples: int | None,
    total_steps: int | None,
    is_resumed: bool = False,
) -> Iterator[str]:
    """Yield a warning if an epoch's last batch has a microbatch of one sample, on which batch norm can't train."""
    if samples is None or settings.data.drop_last or plan.micro_batch_size == 1:
        return
    last_batch_size = samples % plan.global_batch_size
    has_single_sample = (
        last_batch_size == 1 if settings.train.buffers == "sync_bn" else last_batch_size % plan.micro_batch_size == 1
    )
    is_reached = total_steps is None or total_steps > samples // plan.global_batch_size
    if has_single_sample and is_reached and any(isinstance(module, _BATCH_NORMS) for module in model.modules()):
        yield (
            f"warning: step {samples // plan.global_batch_size + 1}, the last of an epoch, has a microbatch of one "
            "sample: "
            f"a batch norm with one value per channel ends the run there; --data.drop_last true"
            f"{' --allow drop_last' * is_resumed} leaves it out"
        )


def early_stop_notes(job: Job, progress: Progress, *, step: int) -> Iterator[str]:
    """Yield a line if the resumed run had already stopped early, and so has nothing left to do."""
    rule = early_stopping(job)
    if rule is not None and progress.waited >= rule.patience:
        yield (
            f"this run stopped early at step {step}: {rule.metric} has not improved in "
            f"{plural(rule.patience, 'evaluation')}; a larger early_stopping= in the job continues it"
        )


def data_length_notes(
    saved_num_samples: int | None, num_samples: int | None, *, cursor: Cursor, total_steps: int | None
) -> Iterator[str]:
    """Yield a line if the resumed run has more or fewer samples than before (`--allow data`)."""
    if saved_num_samples is None or num_samples is None or saved_num_samples == num_samples:
        return
    position_text = f"this epoch was at sample {cursor.position:,}"
    if cursor.position >= num_samples:
        position_text += ", and ends there"
    end_text = (
        ""
        if total_steps is None
        else f"; counted in epochs of {num_samples:,} samples, the run ends at step {total_steps:,}"
    )
    yield (
        f"warning: train_data had {saved_num_samples:,} samples and has {num_samples:,} (--allow data): "
        f"{position_text}{end_text}"
    )


def finished_note(settings: Settings, *, step: int, total: int | None) -> str:
    """Return a line that says the resumed run is at its end or beyond it."""
    requested_steps = settings.train.steps
    if requested_steps is not None and requested_steps == total:
        limit = f"train.steps is {requested_steps:,}"
    else:
        limit = "all its data has been read" if total is None else f"it ends at step {total:,}"
    return f"nothing left to do: the run is at step {step:,}, {limit}"


def _requested_evaluations(job: Job, settings: Settings, evaluate_first: bool) -> Iterator[str]:
    """Yield each setting or argument that needs evaluations, as text for an error."""
    if settings.eval.every is not None:
        yield f"eval.every={settings.eval.every}"
    if evaluate_first:
        yield "--evaluate-first"
    if job.best is not None:
        yield f"best={job.best!r}"
    if job.early_stopping is not None:
        yield f"early_stopping={job.early_stopping!r}"


def _metrics_in_rules(job: Job) -> Iterator[tuple[str, str]]:
    """Yield `best=` and `early_stopping=`, each as text for an error, with the metric that the rule names."""
    if job.best is not None:
        yield f"best={job.best!r}", best_rule(job)[0]
    rule = early_stopping(job)
    if rule is not None and not (job.best is not None and isinstance(job.early_stopping, int)):
        yield f"early_stopping={job.early_stopping!r}", rule.metric
