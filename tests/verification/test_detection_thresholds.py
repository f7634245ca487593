"""verify detects faults of a stated size in each quantity that it compares, and its noise floors are below them.

One rank in this process; the fault is planted in the layout's side alone, after it was built.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.trainer.evaluation.evaluator import Evaluator
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.prepare import prepare
from paceline.verification import verify_worker as worker
from paceline.verification.compare_step import StepComparison
from paceline.verification.diagnosis.observed_step import ObservedStep
from paceline.verification.noise_floor import is_rounding
from paceline.verification.reference.reference import Reference, ReferenceConfig, RunPosition
from paceline.verification.reference.reference_step import run_reference_step
from paceline.verification.rung_result import RungResult
from paceline.verification.verify_answer import Rung, verify_answer

WIDTH = 6
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.bfloat16: 2.0**-7}
Spoil = Callable[[TrainingSetup], None]


pytestmark = pytest.mark.usefixtures("single_thread")


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16, dtype=dtype)
        self.norm = nn.BatchNorm1d(16, dtype=dtype) if norm else nn.LayerNorm(16, dtype=dtype)
        self.second = nn.Linear(16, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return found


def summed(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(output)


def job_of(dtype: torch.dtype = torch.float32, *, norm: bool = False, lr: float = 0.05, **more: Any) -> pl.Job:
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, WIDTH, generator=made), torch.randint(4, (24,), generator=made)
    data = torch.utils.data.TensorDataset(x.to(dtype), y)
    given: dict[str, Any] = {
        "optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=lr, momentum=0.9),
        "loss": summed,
        **more,
    }
    return pl.Job(
        model=lambda: Net(dtype, norm),
        train_data=data,
        eval_data=data,
        metrics={"right": lambda output, batch: ((output.argmax(-1) == batch[1]).sum(), len(output))},
        global_batch_size=8,
        micro_batch_size=4,
        **given,
    )


def verify(job: pl.Job, spoil: Spoil | None, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """All rungs on one rank, with a fault in what the layout's side has built."""
    build = worker.build_in_precision

    def build_in_precision(*given: Any, **more: Any) -> TrainingSetup:
        built = build(*given, **more)
        if spoil is not None:
            spoil(built)
        return built

    monkeypatch.setattr(worker, "build_in_precision", build_in_precision)
    ready = prepare(Task(verb="verify", job="job.py", ranks=1, settings=settings), job=job)
    return worker.run_all_rungs(ready, World.alone(), steps=2)


def scaled_gradient(name: str, factor: float) -> Spoil:
    return lambda built: built.model.get_parameter(name).register_hook(lambda g: g * factor) and None


def seen_with(dtype: torch.dtype, factor: float) -> tuple[RungResult, StepComparison]:
    """One step judged, with one parameter's gradient times a factor."""
    spec = ReferenceConfig(seed=0, global_batch_size=8, micro_batch_size=4)
    reference = Reference(job=job_of(dtype), config=spec, cast=lambda batch: batch)
    rung_result = RungResult()
    position = RunPosition(steps_done=0, epoch=0, batch_start=0)
    judge = StepComparison(run_reference_step(reference, position), rung_result=rung_result)
    gradients = {name: value.clone() for name, value in judge.expected_gradient.items()}
    gradients["first.weight"] = (gradients["first.weight"].double() * factor).to(dtype)
    loss = judge._step.gradient.loss
    judge.compare_forward_backward(ObservedStep(gradients=[gradients], buffers=[{}], losses=[loss]))
    return rung_result, judge


@pytest.mark.parametrize("dtype", EPS)
def test_a_gradient_is_rounding_below_four_units_and_different_from_a_thousand_on(dtype: torch.dtype) -> None:
    """In bfloat16, whose unit is 2^-7, from one half of the gradient on."""
    eps = EPS[dtype]
    for units in (1.0, 4.0):
        assert seen_with(dtype, 1.0 + units * eps)[0].verdict in ("bitwise", "rounding"), units
    for units in (1000.0, 1e5) if eps < 1e-3 else (64.0, 100.0):
        found = seen_with(dtype, 1.0 + units * eps)[0]
        assert found.verdict == "different", (units, found)
        assert found.first_difference is not None and found.first_difference["parameter"] == "first.weight"


@pytest.mark.parametrize("told", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_told_as_no_number_is_different_from_a_number(told: float) -> None:
    rung_result, judge = seen_with(torch.float32, 1.0)
    assert rung_result.verdict == "bitwise"
    judge.compare_forward_backward(ObservedStep(gradients=[dict(judge.expected_gradient)], buffers=[{}], losses=[told]))
    assert rung_result.verdict == "different"
    assert rung_result.first_difference is not None and rung_result.first_difference["parameter"] == "(loss)"


@pytest.mark.parametrize("dtype", EPS)
def test_an_update_is_rounding_to_one_unit_and_different_from_a_thousand_on(dtype: torch.dtype) -> None:
    """Of the weight; in bfloat16, where one rule on one gradient seldom rounds otherwise, from eight units on."""
    eps = EPS[dtype]
    for units, verdict in ((1.0, "rounding"), (1000.0 if eps < 1e-3 else 8.0, "different")):
        judge = seen_with(dtype, 1.0)[1]
        reference, rung_result = judge._reference, judge._rung_result
        before = {name: weight.clone() for name, weight in reference.weights().items()}
        reference.update(judge.expected_gradient)
        after = {name: weight.clone() for name, weight in reference.weights().items()}
        after["first.weight"] = (after["first.weight"].double() * (1.0 + units * eps)).to(dtype)
        judge.compare_weights(weights_before=before, weights_after=after)
        assert rung_result.verdict == verdict, (units, rung_result)


@pytest.mark.parametrize("dtype", EPS)
def test_floors_of_sound_steps_have_an_upper_bound(dtype: torch.dtype) -> None:
    judge = seen_with(dtype, 1.0 + EPS[dtype])[1]
    most = 1000.0 * EPS[dtype] if dtype is not torch.bfloat16 else 0.5
    for name, value in judge.expected_gradient.items():
        assert 0.0 < judge._step.floor(name) <= most * float(value.double().norm()), name
    assert judge._step.floors.loss <= most * abs(judge._step.gradient.loss)


@pytest.mark.parametrize("dtype", EPS)
def test_a_gradient_beyond_rounding_is_no_noise(dtype: torch.dtype) -> None:
    """A nudge that has flipped a decision is left out: from 4096 units on, in bfloat16 from 16."""
    judge = seen_with(dtype, 1.0)[1]
    one = judge._step.gradient
    for units, is_noise in ((1.0, True), (5000.0 if EPS[dtype] < 1e-3 else 20.0, False)):
        other = {name: value.double() * (1.0 + units * EPS[dtype]) for name, value in one.total.items()}
        assert is_rounding(one, replace(one, total=other), judge._reference) is is_noise


def test_a_sound_run_is_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = verify(job_of(norm=True), None, monkeypatch)
    assert answer["verdict"] == "bitwise", answer["lines"]
    assert answer["rungs"][-1]["compared"] == {"weights": 6, "buffers": 3, "metrics": 2}


def wrong_rate(by: float) -> Spoil:
    def spoil(built: TrainingSetup) -> None:
        for group in built.update.optimizers[0].param_groups:
            group["lr"] *= 1.0 + by

    return spoil


def moved_start(built: TrainingSetup) -> None:
    with torch.no_grad():
        built.model.get_parameter("second.bias").view(-1)[1] *= 1.0 + 2.0**-22


def wrong_statistics(built: TrainingSetup) -> None:
    """Running statistics one part in ten thousand off, after each step."""
    step = built.step.compute_gradients

    def gradients(given: Any) -> Any:
        result = step(given)
        with torch.no_grad():
            built.model.get_buffer("norm.running_mean").mul_(1.0001)
        return result

    built.step.compute_gradients = gradients  # type: ignore[method-assign]


def statistics_between_steps(built: TrainingSetup) -> None:
    """Right within a step, and changed where it ends: no step alone shows it."""
    run = built.step.run

    def changed(given: Any) -> Any:
        result = run(given)
        with torch.no_grad():
            built.model.get_buffer("norm.running_mean").mul_(1.01)
        return result

    built.step.run = changed  # type: ignore[method-assign]


def wrong_norm(by: float) -> Spoil:
    """What the gradient is clipped by."""

    def spoil(built: TrainingSetup) -> None:
        norm = built.update._measure_norm
        built.update._measure_norm = lambda gradients: (found := norm(gradients)) and found * (1.0 + by)  # type: ignore[method-assign]

    return spoil


def wrong_loss(built: TrainingSetup) -> None:
    step = built.step.compute_gradients

    def gradients(given: Any) -> Any:
        result = step(given)
        object.__setattr__(result.totals, "loss", result.totals.loss * 1.001)
        return result

    built.step.compute_gradients = gradients  # type: ignore[method-assign]


SIZES: dict[str, tuple[Spoil, str, str]] = {
    "a gradient, by 1e-3": (scaled_gradient("first.weight", 1.001), "first.weight", "a scaled loss"),
    "a gradient, by 2e-4": (scaled_gradient("second.bias", 1.0002), "second.bias", "a scaled loss"),
    "the learning rate, by 1e-3": (wrong_rate(1e-3), "", "times as long"),
    "one bit of a start weight": (moved_start, "second.bias", "unequal initial weights"),
    "running statistics, by 1e-4": (wrong_statistics, "norm.running_mean", "buffers"),
    "running statistics between steps": (statistics_between_steps, "norm.running_mean", "a buffer does not"),
    "the norm that is clipped by, by 2e-3": (wrong_norm(2e-3), "(gradient norm)", "measures their norm"),
    "the loss that is told, by 1e-3": (wrong_loss, "(loss)", "1.001 times"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_fault_of_this_size_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, parameter, cause = SIZES[name]
    clip = {"train.max_grad_norm": 0.1} if "norm that" in name else {}
    answer = verify(job_of(norm="statistics" in name), spoil, monkeypatch, **clip)
    first = answer["first_difference"]
    assert answer["verdict"] == "different", answer["lines"]
    assert parameter in first["parameter"] and cause in first["cause"], first


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0 + 1e-4, "different"), (1.0 + 1e-8, "bitwise"), (math.nan, "different")]
)
def test_a_metric_is_compared_to_six_digits(factor: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Evaluator.run

    def other(*given: Any, **more: Any) -> Any:
        found = run(*given, **more)
        assert found is not None
        return replace(found, metrics={name: value * factor for name, value in found.metrics.items()})

    monkeypatch.setattr(Evaluator, "run", other)
    answer = verify(job_of(), None, monkeypatch)
    assert answer["verdict"] == verdict, answer["lines"]


def test_an_evaluation_that_leaves_a_sample_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Evaluator.run

    def other(*given: Any, **more: Any) -> Any:
        found = run(*given, **more)
        assert found is not None
        return replace(found, samples=found.samples - 1)

    monkeypatch.setattr(Evaluator, "run", other)
    assert "evaluation saw 16 samples instead of 17" in verify(job_of(), None, monkeypatch)["lines"][-1]


@pytest.mark.parametrize(("by", "is_sum"), [(0.0, True), (0.01, False)])
def test_a_loss_that_is_one_percent_off_a_sum_is_told(by: float, is_sum: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(output: Tensor, batch: Any) -> Any:
        total, count = summed(output, batch)
        return total * (1.0 + by / len(output)), count

    answer = verify(job_of(loss=nearly), None, monkeypatch)
    assert bool(answer["rungs"][0]["warning"]) is not is_sum
    assert ("in microbatches of 4" in answer["lines"][-1]) is not is_sum


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_model_with_dropout_is_verified_for_its_microbatches_alone(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(job_of().model(), nn.Dropout(rate))

    answer = verify(replace(job_of(), model=model), None, monkeypatch)
    assert answer["verdict"] != "different" and "The loss is a sum over samples" in answer["rungs"][0]["detail"]
    assert ("one process in microbatches of 4: " in answer["lines"][-1]) is bool(rate)


class _Functional(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


def test_dropout_by_a_function_is_verified_for_its_microbatches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(job_of(), model=lambda: _Functional(torch.float32, False))
    assert "one process in microbatches of 4: " in verify(job, None, monkeypatch)["lines"][-1]


@pytest.mark.parametrize("norm", [False, True])
def test_batchnorm_under_a_loss_over_the_batch_is_of_its_microbatches(
    norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = verify(replace(job_of(norm=norm), loss_over="batch", micro_batch_size=8), None, monkeypatch)
    assert ("one process in microbatches of 8: " in answer["lines"][-1]) is norm


def test_a_rung_that_compared_nothing_has_no_verdict() -> None:
    results = {"one process": {"gradients": 2}, "lockstep in float64": {"gradients": 4}, "lockstep in fp16": {}}
    rungs = [Rung(name=n, rules_out="", result=RungResult(compared=found)) for n, found in results.items()]
    answer = verify_answer(rungs=rungs, layout="ddp", update="sync", ranks=2, steps=1)
    assert [rung["verdict"] for rung in answer["rungs"]] == ["bitwise", "bitwise", "undecided"]
    assert answer["verdict"] == "bitwise"
    rungs[1] = replace(rungs[1], result=RungResult(compared={"gradients": 0}))
    assert verify_answer(rungs=rungs, layout="ddp", update="sync", ranks=2, steps=1)["verdict"] == "undecided"


def test_a_learning_rate_of_zero_is_no_test_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def warming(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step < 4 else 1.0)

    answer = verify(job_of(lr_schedule=warming), None, monkeypatch)
    assert answer["verdict"] == "bitwise" and answer["lines"][-1].endswith("except what is not covered")
    assert any("no step changed them" in line for line in answer["lines"])
    assert not any("no step changed" in line for line in verify(job_of(), None, monkeypatch)["lines"])
