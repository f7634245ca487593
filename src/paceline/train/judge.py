"""Whether an evaluation is the best so far, and whether it is time to stop."""

import math
from dataclasses import dataclass

from paceline.events import EvalDone, Note
from paceline.job import EarlyStopping, Job
from paceline.train.length import Progress
from paceline.train.wishes import best_rule, early_stopping


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from an evaluation."""

    best: bool = False
    ends: bool = False
    notes: tuple[Note, ...] = ()


class Judge:
    """Decides from metrics that every rank has alike; what it remembers is in `progress`, which is saved."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self._progress = progress
        self._metric, self._mode = best_rule(job)
        self._rule = early_stopping(job)

    @property
    def is_over(self) -> bool:
        """Whether the rule for stopping early has ended the run."""
        return self._rule is not None and self._progress.waited >= self._rule.patience

    def hear(self, event: EvalDone) -> Verdict:
        """Judge an evaluation, and remember it."""
        self._progress.unjudged = False
        notes = []
        value = event.metrics.get(self._metric)
        if value is None:
            text = f"best={self._metric!r} is no metric of this job ({', '.join(event.metrics)})"
            notes.append(Note(text=text, level="warning"))
        best = value is not None and _is_better(value, self._progress.best, mode=self._mode)
        if best:
            self._progress.best = value
        ends = self._rule is not None and self._is_out_of_patience(self._rule, event)
        if self._rule is not None and ends:
            text = f"early stop: {self._rule.metric} has not improved in {self._rule.patience} evaluations"
            notes.append(Note(text=text))
        return Verdict(best=best, ends=ends, notes=tuple(notes))

    def _is_out_of_patience(self, rule: EarlyStopping, event: EvalDone) -> bool:
        if rule.metric not in event.metrics:
            return False
        value, progress = event.metrics[rule.metric], self._progress
        if _is_better(value, progress.rule_best, mode=rule.mode, by=rule.min_delta):
            progress.waited, progress.rule_best = 0, value
            return False
        progress.waited += 1
        return progress.waited >= rule.patience


def _is_better(value: float, best: float | None, *, mode: str, by: float = 0.0) -> bool:
    """Whether a metric has improved by more than `by`; a NaN never has."""
    if best is None or math.isnan(value):
        return not math.isnan(value)
    return (value - best if mode == "max" else best - value) > by
