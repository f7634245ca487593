"""The single-process check tells whether a loss is a sum over samples, for any mask."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paceline as pl
from paceline.verification.reference.reference import Reference, ReferenceConfig
from paceline.verification.verify_single_process import verify_single_process


def summed(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1], reduction="sum"), (batch[1] != -100).sum()


def mean(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1])


def mean_as_a_sum(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1]), 1


def mean_beside_a_count(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1]), (batch[1] != -100).sum()


def said(
    loss: Callable[[Tensor, Any], Any],
    masked: list[int],
    autocast: torch.dtype | None = None,
    model: Callable[[], torch.nn.Module] = lambda: torch.nn.Linear(5, 3),
) -> str:
    torch.manual_seed(0)
    labels = torch.arange(8) % 3
    labels[masked] = -100
    job = pl.Job(
        model=model,
        loss=loss,
        train_data=torch.utils.data.TensorDataset(torch.randn(8, 5), labels),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        global_batch_size=8,
        order="sequential",
    )
    spec = ReferenceConfig(seed=0, global_batch_size=8, micro_batch_size=4, autocast=autocast)
    found = verify_single_process(lambda: Reference(job=job, config=spec, cast=lambda value: value))
    return found.detail + found.warning


@pytest.mark.parametrize("masked", [[], [0], [0, 2], [0, 1, 4, 5], [0, 1, 2]], ids=str)
def test_a_sum_is_called_a_sum_and_a_mean_of_masked_labels_never(masked: list[int]) -> None:
    """`[0, 2]` leaves each half of the first microbatch one target: halves alone can't tell."""
    assert "is a sum over samples" in said(summed, masked)
    assert "not a sum over samples" in said(mean_as_a_sum, masked)
    assert ("not a sum over samples" in said(mean, masked)) == bool(masked)


def test_a_mean_beside_a_count_is_named() -> None:
    assert "a mean that is returned with a count" in said(mean_beside_a_count, [])
    assert "a mean that is returned with a count" not in said(mean, [0])


def test_half_precision_is_no_reason_to_call_a_sum_no_sum() -> None:
    assert "is a sum over samples" in said(summed, [0], torch.bfloat16)
    assert "not a sum over samples" in said(mean, [0], torch.bfloat16)


class Drawing(torch.nn.Linear):
    """Its forward draws by itself, in a way that no module's rate tells."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(5, 3)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.draw(x))


@pytest.mark.parametrize(
    ("draw", "sums", "means"),
    [
        (lambda x: F.dropout(x, 0.5), "is a sum over samples", "not a sum over samples"),
        (lambda x: F.dropout(x, p=0.5, training=True), "is a sum over samples", "not a sum over samples"),
        (lambda x: F.alpha_dropout(x, 0.3, True), "is a sum over samples", "not a sum over samples"),
        (
            lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], None, 0.3)[:, 0],
            "is a sum over samples",
            "not a sum over samples",
        ),
        (lambda x: x * torch.rand_like(x), "the forward draws random numbers", "the forward draws random numbers"),
        (lambda x: x * torch.rand([]), "the forward draws random numbers", "the forward draws random numbers"),
    ],
)
def test_draws_of_the_forward_itself_do_not_mislead(draw: Any, sums: str, means: str) -> None:
    assert sums in said(summed, [0], model=lambda: Drawing(draw))
    assert means in said(mean_as_a_sum, [0], model=lambda: Drawing(draw))
