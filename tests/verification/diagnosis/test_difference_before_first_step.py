"""A difference before the first step is named correctly, with its size."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, model_tensors
from paceline.verification.compare_in_lockstep import LockstepComparison
from paceline.verification.rung_result import RungResult


def compared(model: nn.Module, right: nn.Module) -> RungResult:
    world = World.alone()
    built: Any = SimpleNamespace(world=world, weights=ShardedTensors(world=world, tensors=model_tensors(model)))
    reference: Any = SimpleNamespace(model=right)
    lockstep = LockstepComparison(setup=built, reference=reference, report_progress=lambda _: None)
    lockstep._compare_initial_state()
    return lockstep.rung_result


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("running_mean", "unequal initial buffers on rank 0: a forward before"),
        ("weight", "unequal initial weights on rank 0"),
    ],
)
def test_a_buffer_is_no_weight_and_the_distance_is_its_own(name: str, says: str) -> None:
    right = nn.BatchNorm1d(4)
    model = copy.deepcopy(right)
    assert compared(model, right).verdict == "bitwise"
    with torch.no_grad():
        getattr(model, name)[1] += 0.5
    found = compared(model, right)
    first = found.first_difference
    assert first is not None and first["parameter"] == name and first["cause"].startswith(says)
    assert (found.verdict, found.max_difference, found.noise_floor) == ("different", 0.5, 0.0)
    found.record("rounding", difference=3.7e-18, floor=7.4e-17)
    assert found.max_difference == 0.5
