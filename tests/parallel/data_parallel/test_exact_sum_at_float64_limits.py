"""Exact mode at the limits of float64: finite values are added, others are refused with their name."""

import math

import pytest
import torch
from torch import nn

from paceline.comm.process_group import World
from paceline.errors import RunError
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.module_access.parameters import trainable_parameters
from tests.conftest import Shop

COUNTER = """import paceline as pl, torch
RUNS = [0]
def loss(output, batch):
    RUNS[0] += 1
    return output.sum() * 10.0 ** (7 * RUNS[0] - 30), len(output)
def make_job():
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    return pl.Job(model=lambda: torch.nn.Linear(2, 1), loss=loss, train_data=data, global_batch_size=4,
                  forward=lambda model, batch: model(batch[0]),
                  optimizer=lambda named: torch.optim.SGD(named, lr=0.1))
"""


def added(gradients: list[float], *, grid: FixedPointGrid, model: nn.Module) -> float:
    """The exact sum of one-element gradients in float64, one a microbatch."""
    weight = next(model.parameters())
    reducer = ExactReducer(named_parameters=trainable_parameters(model), world=World.alone(), grid=grid)
    try:
        for _ in range(4):
            reducer.begin()
            for gradient in gradients:
                reducer.before_backward(last=gradient is gradients[-1])
                (weight * gradient).sum().backward()
            if reducer.finish(divisor=None):
                assert weight.grad is not None
                return weight.grad.item()
    finally:
        reducer.close()
    raise AssertionError("no grid was found")


@pytest.mark.parametrize("exponent", [-1074, -1073, -1060, -1030, -1000, -960, 0, 900, 1000, 1010, 1018])
def test_exact_mode_adds_float64_from_the_smallest_to_the_largest(exponent: int) -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    gradients = [math.ldexp(1.0, exponent), math.ldexp(5.0, exponent), -math.ldexp(2.0, exponent)]
    grid = FixedPointGrid(names=["weight"])
    assert added(gradients, grid=grid, model=model) == math.ldexp(4.0, exponent)
    assert added(gradients, grid=grid, model=model) == math.ldexp(4.0, exponent)  # the grid follows no further


def test_exact_mode_says_which_gradient_is_too_large_for_it() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with pytest.raises(RunError, match=r"the gradient of weight reaches 1e\+308: exact mode adds values") as found:
        added([1e308], grid=FixedPointGrid(names=["weight"]), model=model)
    assert found.value.cause and "--train.exact" in found.value.hint


def test_a_loss_of_another_size_in_each_run_is_said_to_be_that(shop: Shop) -> None:
    shop.write("job.py", COUNTER)
    ended = shop.train("run", "--train.exact", ranks=1, steps=2)
    assert ended.code == 1 and "step 1: exact mode found no grid" in ended.err, ended.text
    assert "different values for the same batch" in ended.err and "leave --train.exact out" in ended.err
