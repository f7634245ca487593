"""A batch, a (sum, count) pair or a metric of the wrong form is refused with its form and the line to write."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.errors import JobError
from paceline.step.loss.loss_return_value import LossContract


class One(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Two(nn.Linear):
    def forward(self, image: Tensor, text: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(image + text) * scale


class Open(nn.Linear):
    def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
        return super().forward(parts[0], **named)  # type: ignore[call-arg]


def contract(model: nn.Module, **fields: Any) -> LossContract:
    job = pl.Job(
        model=lambda: model, train_data=[1], optimizer=torch.optim.SGD, global_batch_size=1,
        **{"loss": lambda output, batch: output.sum(), **fields},
    )  # fmt: skip
    return LossContract(job=job, model=model)


X, Y = torch.zeros(3, 4), torch.zeros(3)


@pytest.mark.parametrize(
    ("made", "batch", "words", "line"),
    [
        (One, {"image": X, "label": Y}, "keys image, label", 'model(batch["image"])'),
        (One, {"label": Y, "name": ["a"], "image": X}, "passes nothing", 'model(batch["image"])'),
        (One, [X, ("a", "b", "c"), Y], "a list of 3: Tensor[3, 4], tuple, Tensor[3]", "model(batch[0])"),
        (Two, [X, Y], "a list of 2", "model(batch[0], batch[1])"),
        (Two, X, "a Tensor[3, 4]", "model(batch)"),
        (Two, {"x": X, "image": X, "y": Y}, "passes image", 'model(batch["image"], batch["x"])'),
    ],
)
def test_a_batch_that_no_forward_takes_is_named(made: Any, batch: Any, words: str, line: str) -> None:
    model = made(4, 2)
    with pytest.raises(JobError) as refused:
        contract(model).forward(model, batch)
    assert f"{made.__name__}.forward(" in refused.value.what and refused.value.where.startswith(__file__)
    assert words in refused.value.cause and refused.value.hint == f"forward=lambda model, batch: {line}"


def test_an_error_of_the_forwards_own_stays_what_it_is() -> None:
    model = Open(4, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        contract(model, forward=lambda model, batch: model(X, x=X)).forward(model, X)
    with pytest.raises(TypeError, match="linear"):
        contract(model).forward(model, ["text", Y])
    fits = One(4, 2)
    assert torch.equal(contract(fits).forward(fits, {"x": X, "other": Y}), fits(X))
    assert torch.equal(contract(fits).forward(fits, [X, Y]), fits(X))


def test_a_pair_of_count_and_sum_is_named() -> None:
    model = One(4, 2)
    output = model(X)
    for pair in ((3, output.sum()), (torch.tensor(3.0), output.sum())):
        with pytest.raises(JobError, match=r"is \(count, sum\), expected \(sum, count\)"):
            contract(model, loss=lambda output, batch, pair=pair: pair).terms(output, [X, Y], num_samples=3)
    plain = contract(model, loss=lambda output, batch: (output.sum(), 3)).terms(output.detach(), [X, Y], num_samples=3)
    assert plain["loss"][1] == 3.0
