"""A learning-rate schedule resumes bit for bit; a changed one is refused, or applies where it is allowed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torch_s

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint
from paceline.checkpoint.lr_schedule_state import describe_schedules, refuse_short_schedules, schedule_length
from paceline.checkpoint.optimizer_options import factory_options
from paceline.checkpoint.optimizer_state import OptimizerShards
from paceline.checkpoint.resume_checks import check_identity
from paceline.checkpoint.state_outside_state_dict import NonPersistentBuffers
from paceline.checkpoint.train_state import TrainState, collect_files, load_update
from paceline.comm.process_group import World
from paceline.errors import JobError, ResumeError
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, model_tensors, param_tensors
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.trainer.saving.resume_run import read_saved_identity

Schedule = Callable[[Optimizer], Any]
Group = dict[str, Any]


class Held:
    """An optimizer with its schedule, stepped and saved as a run does it, in memory."""

    def __init__(self, schedule: Schedule | None, *, lr: Any = 0.1) -> None:
        model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
        given = factory_options([self.optimizer])
        schedules = [] if schedule is None else [schedule(self.optimizer)]
        world = World(device=torch.device("cpu"))
        named = trainable_parameters(model)
        update = OptimizerUpdate(
            named_parameters=named, optimizers=[self.optimizer], lr_schedulers=schedules, scaler=None, max_grad_norm=None,
            check_finite=False, skip_nonfinite=False, ema=None,
        )  # fmt: skip
        kept = ShardedTensors(world=world, tensors=param_tensors(named))
        self.trained = TrainState(
            model=model, update=update, non_persistent_buffers=NonPersistentBuffers(model), weights=ShardedTensors(world=world, tensors=model_tensors(model)),
            optimizer_shards=OptimizerShards(parameters=named, sharded=kept, world=world),
        )  # fmt: skip
        self.identity = {
            "optimizer": [{"kind": "SGD", "groups": [2], "options": given[0], "names": [["weight", "bias"]]}],
            "schedule": describe_schedules(schedules, [self.optimizer], given),
        }

    def rates(self, steps: int) -> list[Group]:
        """The options that each of so many steps is taken with."""
        found = []
        for _ in range(steps):
            found.append({k: self.optimizer.param_groups[0][k] for k in ("lr", "momentum")})
            self.optimizer.step()
            self.trained.update.step_lr_schedulers()
        return found

    def saved(self, step: int) -> OpenCheckpoint:
        state = {**collect_files(self.trained)[1], "identity": self.identity}
        return OpenCheckpoint(path=Path("step-00000010"), step=step, state=json.loads(json.dumps(state)), files={})

    def goes_on(self, loaded: OpenCheckpoint, *allow: str) -> None:
        check_identity(read_saved_identity(loaded), self.identity, allow=allow)
        load_update(loaded, self.trained, saved_identity=read_saved_identity(loaded), current_identity=self.identity)


class Own(torch_s.LRScheduler):
    """A schedule of the user's own."""

    def __init__(self, optimizer: Optimizer, *, half: int) -> None:
        self.half = half
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [base * 0.5 ** (self.last_epoch / self.half) for base in self.base_lrs]


class Steeper(Own):
    """The same settings, other code."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [base * 0.25 ** (self.last_epoch / self.half) for base in self.base_lrs]


Steeper.__name__ = Steeper.__qualname__ = "Own"


class Falling:
    """A function with state."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.steps)


def falls(steps: int, step: int) -> float:
    return max(0.0, 1 - step / steps)


def lambda_of(steps: int) -> Schedule:
    return lambda o: torch_s.LambdaLR(o, lambda step: max(0.0, 1 - step / steps))


def warm(steps: int, at: int = 4) -> Schedule:
    def made(o: Optimizer) -> Any:
        parts = [torch_s.LinearLR(o, 0.1, 1.0, total_iters=4), torch_s.CosineAnnealingLR(o, steps)]
        return torch_s.SequentialLR(o, parts, milestones=[at])

    return made


def chained(gamma: float) -> Schedule:
    return lambda o: torch_s.ChainedScheduler([torch_s.ExponentialLR(o, gamma), torch_s.StepLR(o, 7)], optimizer=o)


def restarts(first: int) -> Schedule:
    return lambda o: torch_s.CosineAnnealingWarmRestarts(o, first, 2)


def linear(steps: int) -> Schedule:
    return lambda o: torch_s.LinearLR(o, 1.0, 0.1, total_iters=steps)


def cycle(most: float = 0.3, up: int = 6) -> Schedule:
    return lambda o: torch_s.CyclicLR(o, 0.01, most, step_size_up=up)


def once(steps: int = 40, most: float = 0.3) -> Schedule:
    return lambda o: torch_s.OneCycleLR(o, max_lr=most, total_steps=steps)


CHANGES: dict[str, tuple[Schedule | None, Schedule | None, str]] = {
    "cosine": (lambda o: torch_s.CosineAnnealingLR(o, 20), lambda o: torch_s.CosineAnnealingLR(o, 40),
               "CosineAnnealingLR.T_max was 20, is 40"),
    "restarts": (restarts(4), restarts(8), "CosineAnnealingWarmRestarts.T_0 was 4, is 8"),
    "linear": (linear(20), linear(40), "LinearLR.total_iters was 20, is 40"),
    "once": (once(20), once(40), "OneCycleLR.total_steps was 20, is 40"),
    "once higher": (once(most=0.3), once(most=0.6), "group 0: max_lr was 0.3, is 0.6"),
    "step": (lambda o: torch_s.StepLR(o, 10), lambda o: torch_s.StepLR(o, 15), "StepLR.step_size was 10, is 15"),
    "gamma": (lambda o: torch_s.StepLR(o, 30, 0.1), lambda o: torch_s.StepLR(o, 30, 0.5), "StepLR.gamma was 0.1"),
    "milestones": (lambda o: torch_s.MultiStepLR(o, [5, 20]), lambda o: torch_s.MultiStepLR(o, [5, 30]),
                   "MultiStepLR.milestones was"),
    "exponential": (lambda o: torch_s.ExponentialLR(o, 0.9), lambda o: torch_s.ExponentialLR(o, 0.8),
                    "ExponentialLR.gamma was 0.9, is 0.8"),
    "power": (lambda o: torch_s.PolynomialLR(o, 20), lambda o: torch_s.PolynomialLR(o, 20, 2.0),
              "PolynomialLR.power was 1.0, is 2.0"),
    "cyclic": (cycle(), cycle(up=9), "CyclicLR.total_size was 12.0, is 18.0"),
    "cyclic higher": (cycle(), cycle(0.5), "max_lr"),
    "sequential": (warm(20), warm(40), "CosineAnnealingLR.T_max was 20, is 40"),
    "milestone": (warm(20), warm(20, at=6), "SequentialLR.milestones was [4], is [6]"),
    "chained": (chained(0.9), chained(0.8), "ExponentialLR.gamma was 0.9, is 0.8"),
    "lambda": (lambda_of(20), lambda_of(40), "LambdaLR.lr_lambdas[0]: steps was 20, is 40"),
    "partial": (lambda o: torch_s.LambdaLR(o, partial(falls, 20)), lambda o: torch_s.LambdaLR(o, partial(falls, 40)),
                "argument 0 was 20, is 40"),
    "callable": (lambda o: torch_s.LambdaLR(o, Falling(20)), lambda o: torch_s.LambdaLR(o, Falling(40)),
                 "steps was 20, is 40"),
    "literal": (lambda o: torch_s.LambdaLR(o, lambda step: 1.0 if step < 30 else 0.1),
                lambda o: torch_s.LambdaLR(o, lambda step: 1.0 if step < 25 else 0.1),
                "LambdaLR.lr_lambdas[0]: the function was changed"),
    "own": (lambda o: Own(o, half=5), lambda o: Own(o, half=9), "Own.half was 5, is 9"),
    "own code": (lambda o: Own(o, half=5), lambda o: Steeper(o, half=5), "Own.Own.get_lr: the function was changed"),
    "another": (lambda o: torch_s.StepLR(o, 10), linear(20), "was StepLR, is LinearLR"),
    "taken out": (cycle(), None, "was CyclicLR, is none"),
    "added": (None, once(), "was none, is OneCycleLR"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_an_unchanged_schedule_goes_on_bit_for_bit(name: str) -> None:
    schedule = CHANGES[name][0]
    whole, first, second = Held(schedule), Held(schedule), Held(schedule)
    first.rates(10)
    second.goes_on(first.saved(10))
    assert second.rates(10) == whole.rates(20)[10:]


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_schedule_is_refused_and_stands_where_it_would_stand_where_it_is_allowed(name: str) -> None:
    before, after, words = CHANGES[name]
    first, whole = Held(before), Held(after)
    first.rates(10)
    with pytest.raises(ResumeError) as refused:
        Held(after).goes_on(first.saved(10))
    assert f"schedule: {words}" in str(refused.value) or words in str(refused.value)
    assert "--allow schedule" in str(refused.value)

    second = Held(after)
    second.goes_on(first.saved(10), "schedule")
    expected = whole.rates(22)
    assert second.rates(6) == expected[10:16]
    third = Held(after)
    third.goes_on(second.saved(16))
    assert third.rates(6) == expected[16:]


@pytest.mark.parametrize(
    ("before", "after"),
    [(CHANGES[name][:2]) for name in ("cosine", "linear", "once", "step", "milestones", "sequential", "chained")],
)
def test_a_checkpoint_that_does_not_name_its_schedule_is_compared_by_its_state(
    before: Schedule, after: Schedule
) -> None:
    first = Held(before)
    whole = Held(before).rates(20)
    first.rates(10)
    loaded = first.saved(10)
    del loaded.state["identity"]["schedule"]
    same = Held(before)
    same.goes_on(loaded)
    assert same.rates(10) == whole[10:]
    with pytest.raises(ResumeError, match="schedule: "):
        Held(after).goes_on(loaded)


@pytest.mark.parametrize("lr", [np.float32(0.2), np.float64(0.2), np.array(0.2), torch.tensor(0.2), 1])
@pytest.mark.parametrize("schedule", ["exponential", "lambda", "sequential", "own", "once"])
def test_a_rate_of_any_type_goes_on_bit_for_bit(lr: Any, schedule: str) -> None:
    made = CHANGES[schedule][0]
    whole, first, second = (Held(made, lr=lr.clone() if isinstance(lr, torch.Tensor) else lr) for _ in range(3))
    first.rates(10)
    second.goes_on(first.saved(10))
    went, expected = second.rates(10), whole.rates(20)[10:]
    assert [(float(a["lr"]), type(a["lr"])) for a in went] == [(float(b["lr"]), type(b["lr"])) for b in expected]


def test_a_rate_of_another_type_is_no_other_rate() -> None:
    first = Held(lambda_of(20), lr=np.float64(0.1))
    first.rates(3)
    Held(lambda_of(20), lr=0.1).goes_on(first.saved(3))
    with pytest.raises(ResumeError, match=r"optimizer: lr was 0.1, is 0.2"):
        Held(lambda_of(20), lr=np.float64(0.2)).goes_on(first.saved(3))


def test_allowing_one_difference_allows_no_other() -> None:
    first = Held(lambda_of(20))
    first.identity["seed"] = 0
    first.rates(3)
    second = Held(lambda_of(20), lr=0.2)
    second.identity["seed"] = 1
    with pytest.raises(ResumeError) as refused:
        second.goes_on(first.saved(3), "optimizer")
    assert "seed: was 0, is 1" in str(refused.value) and "optimizer" not in str(refused.value)


def test_groups_of_as_many_parameters_may_hold_others() -> None:
    first, second = Held(None), Held(None)
    second.identity["optimizer"][0]["names"] = [["weight", "scale"]]
    with pytest.raises(ResumeError, match="group 0 of SGD had bias, has scale"):
        second.goes_on(first.saved(1))


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        (once(12), 12),
        (lambda o: torch_s.StepLR(o, 3), None),
        (lambda o: torch_s.ChainedScheduler([torch_s.StepLR(o, 3), once(9)(o)], optimizer=o), 9),
        (lambda o: torch_s.SequentialLR(o, [torch_s.ConstantLR(o), once(9)(o)], milestones=[4]), 13),
        (lambda o: torch_s.SequentialLR(o, [once(9)(o), torch_s.ConstantLR(o)], milestones=[4]), None),
        (lambda o: torch_s.SequentialLR(o, [once(4)(o), torch_s.ConstantLR(o)], milestones=[12]), 4),
    ],
)  # fmt: skip
def test_how_often_a_schedule_can_be_stepped_is_known_before(schedule: Schedule, most: int | None) -> None:
    held = Held(schedule)
    assert schedule_length(held.trained.update.lr_schedulers[0]) == most
    refuse_short_schedules(held.trained.update.lr_schedulers, total_steps=most or 1000)
    held.rates(most or 40)
    if most is not None:
        with pytest.raises(JobError, match="ends before the run does"):
            refuse_short_schedules(Held(schedule).trained.update.lr_schedulers, total_steps=most + 1)
        with pytest.raises(JobError, match="Tried to step"):
            held.rates(1)


@pytest.mark.parametrize(("was", "has", "refused"), [("m3", "m2", True), ("m3", "m3", False), ("m3", "", False), ("", "m2", False), (None, "m2", False)])  # fmt: skip
def test_a_run_is_one_job_s_and_an_object_of_python_has_no_name(was: str | None, has: str, refused: bool) -> None:
    saved = {} if was is None else {"job": was}
    now = {"job": has, "exact": False}
    if refused:
        with pytest.raises(ResumeError, match="job: was m3, is m2"):
            check_identity({**saved, "exact": False}, now, allow=())
    check_identity({**saved, "exact": False}, now, allow=("job",) if refused else ())
