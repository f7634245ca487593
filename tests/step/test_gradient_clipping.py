"""The gradient norm is torch's own to the bit, and stays finite where the squares of finite values overflow."""

import math

import pytest
import torch
from torch import nn

from paceline.errors import NonFiniteError
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.step.optimizer_update import OptimizerUpdate


def updated(values: list[float], *, dtype: torch.dtype, clip: float | None) -> tuple[float, torch.Tensor]:
    """The norm that a step measures of a gradient, and the gradient as the optimizer gets it."""
    model = nn.Linear(len(values), 1, bias=False, dtype=dtype)
    model.weight.grad = torch.tensor([values], dtype=dtype)
    update = OptimizerUpdate(
        named_parameters=trainable_parameters(model), optimizers=[torch.optim.SGD(model.parameters(), lr=1e-3)], lr_schedulers=[], scaler=None,
        max_grad_norm=clip, check_finite=True, skip_nonfinite=False, ema=None,
    )  # fmt: skip
    norm, taken = update.commit(step=1, loss=1.0)
    assert taken and norm is not None
    return norm.item(), model.weight.grad


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 1e30), (torch.float32, 2.5e19), (torch.bfloat16, 1e30), (torch.float64, 1e200)]
)
def test_a_finite_gradient_whose_squares_are_not_is_measured_and_clipped(dtype: torch.dtype, size: float) -> None:
    norm, gradient = updated([3 * size, -4 * size], dtype=dtype, clip=None)
    assert norm == pytest.approx(5 * size, rel=1e-2 if dtype is torch.bfloat16 else 1e-6)
    norm, gradient = updated([3 * size, -4 * size], dtype=dtype, clip=10.0)
    torch.testing.assert_close(gradient.double(), torch.tensor([[6.0, -8.0]]).double(), rtol=1e-2, atol=0.0)


def test_an_ordinary_norm_is_torchs_own_to_the_bit() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    norm, _ = updated(values.tolist(), dtype=torch.float32, clip=1.0)
    assert norm == nn.utils.get_total_norm([values.view(1, -1)]).item()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="gradients are not finite in weight"):
        updated([1e30, bad], dtype=torch.float32, clip=None)


def test_a_sparse_gradient_is_clipped_as_it_should_be_and_a_smaller_one_left_as_it_is() -> None:
    rows = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    for most, right in ((10.0, rows), (2.5, rows / 2)):
        model = nn.Embedding(5, 2, sparse=True)
        (model(torch.tensor([1, 3])) * rows).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad = model.weight.grad.coalesce()
        update = OptimizerUpdate(
            named_parameters=trainable_parameters(model), optimizers=[torch.optim.SGD(model.parameters(), lr=1e-3)], lr_schedulers=[],
            scaler=None, max_grad_norm=most, check_finite=True, skip_nonfinite=False, ema=None,
        )  # fmt: skip
        norm, _ = update.commit(step=1, loss=1.0)
        assert norm is not None and norm.item() == 5.0
        torch.testing.assert_close(model.weight.grad.coalesce().values(), right, rtol=1e-6, atol=0.0)
