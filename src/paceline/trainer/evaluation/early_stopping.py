"""The decisions that follow from an evaluation: whether it is the best so far, and whether to stop early.

Values of different metrics are not comparable. So if a resumed job names another metric, the best value and the count
of evaluations start over.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.events import EvalDone, Note
from paceline.job import EarlyStopping, Job
from paceline.trainer.checks.evaluation_checks import best_rule, early_stopping
from paceline.trainer.setup.duration import Progress


@dataclass(frozen=True, kw_only=True)
class EvaluationOutcome:
    """The consequences of one evaluation."""

    is_best: bool = False
    ends_run: bool = False
    notes: tuple[Note, ...] = ()


class BestMetricTracker:
    """A tracker of the best metric and of early stopping. It stores its state in `progress`, which checkpoints contain.

    `rule_changes` are lines for the banner of a resumed run, on metrics that the job has changed.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self._progress = progress
        self._metric, self._mode = best_rule(job)
        self._rule = early_stopping(job)
        self._best_rule = f"{self._metric}:{self._mode}"
        progress.best_of = progress.best_of or self._best_rule
        self.rule_changes = (*self._changed_best_notes(), *self._changed_rule_notes())

    @property
    def is_over(self) -> bool:
        """True once early stopping has ended the run."""
        return self._rule is not None and self._progress.waited >= self._rule.patience

    def record_evaluation(self, event: EvalDone) -> EvaluationOutcome:
        """Record an evaluation, and return whether it is the best so far and whether it ends the run."""
        self._progress.is_evaluation_pending = False
        notes = []
        value = event.metrics.get(self._metric)
        if value is None:
            text = f"best={self._metric!r} is not a metric of this job ({', '.join(event.metrics)})"
            notes.append(Note(text=text, level="warning"))
        best_value = self._progress.best if self._progress.best_of == self._best_rule else None
        is_best = value is not None and _is_better(value, best_value, mode=self._mode)
        if is_best:
            self._progress.best, self._progress.best_of = value, self._best_rule
        ends_run = self._rule is not None and self._is_out_of_patience(self._rule, event)
        if self._rule is not None and ends_run:
            text = f"early stop: {self._rule.metric} has not improved in {self._rule.patience} evaluations"
            notes.append(Note(text=text))
        return EvaluationOutcome(is_best=is_best, ends_run=ends_run, notes=tuple(notes))

    def _changed_best_notes(self) -> Iterator[str]:
        """Yield a note if the metric for `best` has changed. The saved best stays valid until the next evaluation."""
        progress = self._progress
        if progress.best is not None and progress.best_of != self._best_rule:
            yield (
                f"best: by {self._best_rule} from here on, starting with the next evaluation; "
                f"until then the best is by {progress.best_of}"
            )

    def _changed_rule_notes(self) -> Iterator[str]:
        """Yield a note and restart the count if the metric for early stopping has changed."""
        if self._rule is None:
            return
        progress, rule_name = self._progress, f"{self._rule.metric}:{self._rule.mode}"
        if progress.rule_of not in ("", rule_name) and progress.rule_best is not None:
            yield f"early stopping: by {rule_name} from here on, with a new count; before, it was by {progress.rule_of}"
            progress.waited, progress.rule_best = 0, None
        progress.rule_of = rule_name

    def _is_out_of_patience(self, rule: EarlyStopping, event: EvalDone) -> bool:
        """Count this evaluation, and return whether the metric has not improved for `patience` evaluations."""
        if rule.metric not in event.metrics:
            return False
        assert rule.mode is not None  # set when the rule was built
        value, progress = event.metrics[rule.metric], self._progress
        if _is_better(value, progress.rule_best, mode=rule.mode, min_delta=rule.min_delta):
            progress.waited, progress.rule_best = 0, value
            return False
        progress.waited += 1
        return progress.waited >= rule.patience


def _is_better(value: float, best: float | None, *, mode: str, min_delta: float = 0.0) -> bool:
    """Return True if a metric has improved by more than `min_delta`; NaN never counts as an improvement."""
    if best is None or math.isnan(value):
        return not math.isnan(value)
    return (value - best if mode == "max" else best - value) > min_delta
