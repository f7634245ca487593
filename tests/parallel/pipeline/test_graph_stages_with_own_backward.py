"""What a graph would lose between modules is refused by name, and works inside a module that stays whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.parallel.pipeline.graph.cut_points import plan_graph
from paceline.parallel.pipeline.graph.stages import GraphStages
from tests.parallel.pipeline.stages_in_one_process import Ranks, alone

WIDTH = 4


class Reversed(torch.autograd.Function):
    """A gradient reversal layer: the identity, whose backward negates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reverse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Reversed.apply(x)
        return found


class Island(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ torch.eye(WIDTH)


class Model(nn.Module):
    """A skip connection keeps it from being a chain; `what` comes between its modules."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(2))
        self.reverse, self.island, self.what = Reverse(), Island(), what

    def forward(self, x: Tensor) -> Any:
        first = self.a(x)
        h = torch.tanh(self.b(first)) + first
        if self.what == "a function":
            h = Reversed.apply(h)
        if self.what == "a function in a module":
            h = self.reverse(h)
        if self.what == "a hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.5)
        if self.what == "a region":
            with torch.autocast("cpu", enabled=False):
                h = h.float() @ torch.eye(WIDTH)
        if self.what == "a region in a module":
            h = self.island(h)
        return self.c(h), self.scale


def loss_of(model: nn.Module, microbatch: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled="region" in str(model.what)):
        output, scale = model(torch.ones(3, WIDTH) * (microbatch + 1))
    return (output.float().square().sum() * scale.sum()).float()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a function", "the forward calls Reversed.apply between its modules"),
        ("a hook", "the forward calls Tensor.register_hook between its modules"),
    ],
)
def test_what_a_graph_would_lose_is_refused_with_its_line(what: str, said: str) -> None:
    model = Model(what)
    with pytest.raises(LayoutError, match=said) as refused:
        plan_graph(model, num_stages=2, call=lambda: loss_of(model, 0))
    assert "test_graph_stages_with_own_backward.py" in refused.value.where
    assert Reversed.apply.__self__ is Reversed, "torch's own class is as before"


def ranks_of(model: Model) -> Ranks:
    plan = plan_graph(model, num_stages=2, call=lambda: loss_of(model, 0))
    staged = lambda each, index: GraphStages(each, split=plan.split, owned_stages=[index], empty_model=plan.empty_model)  # noqa: E731
    return Ranks(model, cut=plan.split, loss=loss_of, staged=staged)


@pytest.mark.parametrize("what", ["nothing", "a function in a module", "a region in a module"])
def test_inside_a_module_and_a_parameter_that_is_returned_train_as_in_one_process(what: str) -> None:
    torch.manual_seed(0)
    model = Model(what)
    losses, right, _ = alone(model, loss=loss_of, num_micro=2)
    ranks = ranks_of(model)
    assert all(torch.equal(ranks.train(microbatch), loss) for microbatch, loss in enumerate(losses))
    gradients = ranks.gradients()
    assert gradients.keys() == right.keys() and all(torch.equal(gradients[name], right[name]) for name in right)


def test_an_autocast_region_is_refused_in_mixed_precision_alone() -> None:
    ranks = ranks_of(Model("a region"))
    with pytest.raises(LayoutError, match=r"the forward calls torch\.autocast between its modules"):
        ranks.train(0)
