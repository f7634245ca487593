"""A learning-rate schedule that counts epochs is noticed before the first step; one that counts updates is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_s

from paceline.trainer.checks.lr_schedule_units import schedules_in_epochs
from tests.conftest import SMALL_JOB, Shop

Make = Callable[[Any], Any]


def found(make: Make, *, total: int | None, per_epoch: int | None) -> list[str]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return schedules_in_epochs([make(optimizer)], total_steps=total, epoch_steps=per_epoch)


def warm(last: Make, *, steps: int) -> Make:
    return lambda o: torch_s.SequentialLR(o, [torch_s.LinearLR(o, 0.1, total_iters=steps), last(o)], [steps])


EPOCHS: dict[str, tuple[Make, str]] = {
    "cosine": (lambda o: torch_s.CosineAnnealingLR(o, 90, eta_min=1e-5),
               "CosineAnnealingLR(o, T_max=90 * 391, eta_min=1e-05)"),
    "step": (lambda o: torch_s.StepLR(o, 30), "StepLR(o, step_size=30 * 391, gamma=0.1)"),
    "small step": (lambda o: torch_s.StepLR(o, 1, 0.97), "StepLR(o, step_size=1 * 391, gamma=0.97)"),
    "milestones": (lambda o: torch_s.MultiStepLR(o, [60, 30, 80], 0.2),
                   "MultiStepLR(o, [n * 391 for n in [30, 60, 80]], gamma=0.2)"),
    "exponential": (lambda o: torch_s.ExponentialLR(o, 0.95), "ExponentialLR(o, 0.95 ** (1 / 391))"),
    "polynomial": (lambda o: torch_s.PolynomialLR(o, 90, 0.9), "PolynomialLR(o, total_iters=90 * 391, power=0.9)"),
    "after a warm-up": (warm(lambda o: torch_s.CosineAnnealingLR(o, 85), steps=5),
                        "CosineAnnealingLR(o, T_max=85 * 391)"),
}  # fmt: skip


@pytest.mark.parametrize("name", EPOCHS)
def test_a_schedule_in_epochs_is_told_with_the_line_to_type(name: str) -> None:
    make, line = EPOCHS[name]
    (said,) = found(make, total=90 * 391, per_epoch=391)
    assert "once per update, not once per epoch" in said and "of 35,190 updates" in said
    assert said.endswith(f"torch.optim.lr_scheduler.{line}")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    wide = eval(line, {**vars(torch_s), "o": optimizer})
    assert not schedules_in_epochs([wide], total_steps=90 * 391, epoch_steps=391), "what is told to type is right"


UPDATES: dict[str, Make] = {
    "cosine": lambda o: torch_s.CosineAnnealingLR(o, 35_190),
    "a cosine that ends earlier": lambda o: torch_s.CosineAnnealingLR(o, 20_000),
    "step": lambda o: torch_s.StepLR(o, 30 * 391),
    "slow": lambda o: torch_s.StepLR(o, 100, 0.99),
    "rises": lambda o: torch_s.StepLR(o, 10, 1.1),
    "milestones": lambda o: torch_s.MultiStepLR(o, [500, 20_000]),
    "a warm-up alone": lambda o: torch_s.LinearLR(o, 0.1, total_iters=500),
    "a warm-up before": warm(lambda o: torch_s.CosineAnnealingLR(o, 34_690), steps=500),
    "restarts": lambda o: torch_s.CosineAnnealingWarmRestarts(o, 100),
    "no known kind": lambda o: torch_s.LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_schedule_in_updates_is_not_told(name: str) -> None:
    assert found(UPDATES[name], total=90 * 391, per_epoch=391) == []


def test_a_step_of_a_few_epochs_in_a_short_run_is_told() -> None:
    step: Make = lambda o: torch_s.StepLR(o, 2, 0.1)  # noqa: E731
    assert len(found(step, total=6 * 13, per_epoch=13)) == 1
    assert found(lambda o: torch_s.StepLR(o, 2 * 13, 0.1), total=6 * 13, per_epoch=13) == []
    assert found(lambda o: torch_s.StepLR(o, 10, 0.1), total=6 * 13, per_epoch=13) == [], "30 of 78 updates"


@pytest.mark.parametrize(
    ("make", "epochs"),
    [
        (lambda o: torch_s.StepLR(o, 1, 0.1), 5),
        (lambda o: torch_s.MultiStepLR(o, [3, 6]), 8),
        (lambda o: torch_s.ExponentialLR(o, 0.15), 3),
    ],
)
def test_a_rate_that_is_gone_within_the_first_epoch_is_told(make: Make, epochs: int) -> None:
    assert len(found(make, total=4 * epochs, per_epoch=4)) == 1
    assert found(make, total=4, per_epoch=4) == [], "one epoch"


def test_as_many_updates_as_epochs_are_told_in_short_epochs_also() -> None:
    cosine: Make = lambda o: torch_s.CosineAnnealingLR(o, 6)  # noqa: E731
    assert len(found(cosine, total=24, per_epoch=4)) == 1
    assert found(cosine, total=28, per_epoch=4) == [], "of seven epochs"
    assert found(cosine, total=6, per_epoch=1) == [], "an epoch is one update"
    assert found(cosine, total=4, per_epoch=4) == [], "longer than the run"
    assert found(cosine, total=None, per_epoch=None) == [], "of unknown length"
    (said,) = found(cosine, total=1000, per_epoch=None)
    assert said.endswith("CosineAnnealingLR(o, T_max=6 * steps_of_an_epoch)"), "a stream"


def test_a_run_warns_before_its_first_step_and_not_again(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace("StepLR(o, 5, 0.9)", "CosineAnnealingLR(o, 3)"))
    words = ("--train.epochs", "3")
    ended = shop.run("train", "job.py", "--ranks", "1", "--run-dir", "run", *words)
    assert ended.code == 0 and ended.text.count("not once per epoch") == 1, ended.text
    assert "warning: lr_schedule=" in ended.text and "T_max=3 * 5)" in ended.text
    assert ended.text.index("not once per epoch") < ended.text.index("step 1")
