"""An evaluation decides the best result so far and when to stop early."""

import math
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.events import EvalDone
from paceline.trainer.evaluation.early_stopping import BestMetricTracker
from paceline.trainer.setup.duration import Progress


def heard(values: list[dict[str, float]], **options: Any) -> list[tuple[bool, bool, int]]:
    """For each evaluation: is it the best, does it end the run, how many notes."""
    job = pl.Job(model=torch.nn.Identity, train_data=[0], optimizer=torch.optim.SGD, global_batch_size=1, **options)
    judge = BestMetricTracker(job, Progress())
    said = []
    for step, metrics in enumerate(values):
        event = EvalDone(step=step, split="eval", metrics=metrics, samples=1, seconds=0.0, average=False, extra={})
        verdict = judge.record_evaluation(event)
        assert judge.is_over == verdict.ends_run
        said.append((verdict.is_best, verdict.ends_run, len(verdict.notes)))
    return said


def test_the_lowest_loss_is_best_and_nothing_ends_without_a_rule() -> None:
    losses = [3.0, 2.0, 2.0, math.nan, math.inf, 1.9]
    assert heard([{"loss": loss} for loss in losses]) == [
        (best, False, 0) for best in (True, True, False, False, False, True)
    ]


@pytest.mark.parametrize(("by", "ends"), [(0.0, [False, False, False, True]), (0.5, [False, False, True, True])])
def test_patience_counts_evaluations_that_do_not_improve_by_enough(by: float, ends: list[bool]) -> None:
    rule = pl.EarlyStopping(metric="right", mode="max", patience=2, min_delta=by)
    values = [{"loss": 1.0, "right": right} for right in (0.1, 0.2, 0.15, math.nan)]
    assert [ended for _, ended, _ in heard(values, early_stopping=rule)] == ends


def test_a_best_that_on_eval_leaves_out_is_told_and_the_rule_is_heard_all_the_same() -> None:
    rule = pl.EarlyStopping(metric="loss", mode="min", patience=1)
    values = [{"loss": 1.0, "score": 3.0}, {"loss": 1.0}]
    assert heard(values, best="score:max", early_stopping=rule) == [(True, False, 0), (False, True, 2)]


def judged(progress: Progress, values: list[dict[str, float]], **options: Any) -> tuple[BestMetricTracker, list[bool]]:
    """A part of a run that begins with this progress, as a checkpoint gave it back."""
    job = pl.Job(model=torch.nn.Identity, train_data=[0], optimizer=torch.optim.SGD, global_batch_size=1, **options)
    judge = BestMetricTracker(job, progress)
    events = [EvalDone(step=1, split="eval", metrics=value, samples=1, seconds=0.0) for value in values]
    return judge, [judge.record_evaluation(event).is_best for event in events]


def test_another_metric_or_mode_on_going_on_begins_anew_and_says_so() -> None:
    progress = Progress()
    assert judged(progress, [{"loss": 2.0, "near": 0.2}], best="loss:min")[0].rule_changes == ()
    progress = Progress.from_json(progress.as_json())
    judge, best = judged(progress, [], best="near:max")
    assert "best: by near:max from here on" in judge.rule_changes[0] and "by loss:min" in judge.rule_changes[0]
    assert judged(progress, [], best="loss:min")[0].rule_changes == (), (
        "nothing was judged by the other: the old mark holds"
    )
    judge, best = judged(progress, [{"loss": 2.1, "near": 0.2}, {"loss": 1.0, "near": 0.1}], best="near:max")
    assert best == [True, False]
    assert judged(progress, [{"loss": 1.0, "near": 0.15}], best="near:max")[1] == [False]
    assert judged(progress, [{"loss": 1.0, "near": 0.15}], best="near:min")[1] == [True]


def test_patience_of_another_metric_is_counted_anew() -> None:
    progress = Progress()
    values = [{"loss": 2.0, "near": 0.2}] * 3
    assert judged(progress, values, best="loss:min", early_stopping=2)[0].is_over
    progress = Progress.from_json(progress.as_json())
    assert judged(progress, [], best="loss:min", early_stopping=2)[0].is_over, "by the same rule it has ended"
    judge, _ = judged(progress, [], best="near:max", early_stopping=2)
    assert not judge.is_over
    assert (
        "early stopping: by near:max from here on, with a new count; before, it was by loss:min" in judge.rule_changes
    )
    assert not judged(progress, values[:2], best="near:max", early_stopping=2)[0].is_over
    assert judged(progress, values[:1], best="near:max", early_stopping=2)[0].is_over


def test_a_checkpoint_that_does_not_say_its_rule_is_taken_by_the_job_s() -> None:
    progress = Progress.from_json({"tokens": 1.0, "best": 2.0, "waited": 1, "rule_best": 2.0})
    judge, best = judged(progress, [{"loss": 2.5}], early_stopping=2)
    assert (judge.rule_changes, best, judge.is_over) == ((), [False], True)
