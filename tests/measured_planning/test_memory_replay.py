"""The memory of a replayed step against the allocator's count in a real run's processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.memory.forecast import against, forecast
from benchmarks.memory.measured import Setting, measure
from benchmarks.memory.resident import resident_now
from torch import nn

import paceline as pl
from paceline.commands.common.execution import RunOptions, make_task
from paceline.config.task import Task
from paceline.errors import PacelineError
from paceline.measured_planning import memory_replay as replaying
from paceline.trainer.setup.prepare import prepare

NEAR = 0.01
SMALL: dict[str, Any] = {"depth": 2}


def near(setting: Setting) -> None:
    held = against(measure(setting))
    assert held.exact, "parameters, gradients and optimizer"
    assert abs(held.error) < NEAR, f"{held.error:+.2%} of {held.measured_bytes:,} bytes, in {held.phase}"


@pytest.mark.parametrize(
    "setting",
    [
        Setting(family="unet", batch=16, micro=2, job={"depth": 2}),
        Setting(family="llama", layout="fsdp", ranks=2, job=SMALL),
    ],
    ids=str,
)
def test_what_it_holds_is_what_a_run_held(setting: Setting) -> None:
    near(setting)


@pytest.mark.soak
@pytest.mark.parametrize(
    "setting",
    [
        Setting(family="resnet", layout="ddp", ranks=2, optimizer="sgd"),
        Setting(family="gpt2", layout="pp", ranks=2, micro=2, job=SMALL),
        Setting(family="mlp", layout="zero1", ranks=2, job=SMALL),
        Setting(family="t5", layout="tp", ranks=2, job=SMALL),
        Setting(family="gpt2", layout="dp_shard=2,cp=2", ranks=4, job=SMALL),
        Setting(family="mixtral", layout="fsdp,remat=full", ranks=2, job=SMALL),
    ],
    ids=str,
)
def test_what_it_holds_is_what_a_larger_run_held(setting: Setting) -> None:
    near(setting)


def test_a_large_run_is_replayed_in_little_memory() -> None:
    before = resident_now()
    large = Setting(family="llama", layout="fsdp", ranks=64, batch=64, job={"width": 4096, "depth": 4, "length": 2048})
    (found,) = forecast(large)
    assert found.peak.total > 4 << 30
    assert found.between_steps.parameters * 60 < found.peak.total
    assert resident_now() - before < 1 << 30


def test_a_stage_has_no_memory_of_what_other_stages_train() -> None:
    """A split embedding or head of another stage has none either."""
    for stage in forecast(Setting(family="llama", layout="pp=2,tp=2", ranks=4, micro=2, job=SMALL)):
        held = stage.between_steps
        assert held.gradients <= held.parameters < 1.001 * held.gradients


def test_more_microbatches_hold_nothing_more_but_their_data_and_are_left_out() -> None:
    """The data of this batch and of the one before, until it is known that none of its gradients was bad."""
    few, many = (forecast(Setting(family="mlp", batch=batch, micro=2, job=SMALL))[0] for batch in (4, 32))
    assert many.peak.total == few.peak.total + 2 * (32 - 4) * (256 * 4 + 8)


def test_an_error_of_the_model_is_told_as_it_is() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            raise ValueError("a model of its own mind")

    common = RunOptions(ranks=1, layout="single", device="cpu", quiet=True)
    task: Task = make_task("compare", "benchmarks.memory.jobs:mlp", common, [])
    ready = prepare(task)
    job: pl.Job = replace(ready.job, model=Broken)
    with pytest.raises((PacelineError, ValueError), match="of its own mind"):
        replaying.replay(job, ready.settings, ready.plan)
