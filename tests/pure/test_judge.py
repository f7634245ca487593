"""What an evaluation decides: the best so far, and when to stop early."""

import math
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.events import EvalDone
from paceline.train.judge import Judge
from paceline.train.length import Progress


def heard(values: list[dict[str, float]], **options: Any) -> list[tuple[bool, bool, int]]:
    """For each evaluation: is it the best, does it end the run, how many notes."""
    job = pl.Job(model=torch.nn.Identity, train_data=[0], optimizer=torch.optim.SGD, global_batch_size=1, **options)
    judge = Judge(job, Progress())
    said = []
    for step, metrics in enumerate(values):
        event = EvalDone(step=step, split="eval", metrics=metrics, samples=1, seconds=0.0, average=False, extra={})
        verdict = judge.hear(event)
        assert judge.is_over == verdict.ends
        said.append((verdict.best, verdict.ends, len(verdict.notes)))
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
