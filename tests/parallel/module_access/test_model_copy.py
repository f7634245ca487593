"""A model that a forward has left tensors in can be copied."""

import torch
from torch import Tensor, nn

from paceline.parallel.module_access.model_copy import copy_model
from paceline.parallel.sharding.shardability_check import accepts_empty_tensor


class Keeps(nn.Module):
    """Keeps what many models of experts keep: a loss of its own, and a list of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), {"outputs": [torch.zeros(1)]}
        self.aux_loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        self.aux_loss = output.square().mean()
        self.seen["outputs"].append(output)
        return output


def test_what_hangs_in_a_graph_is_its_value_in_the_copy() -> None:
    model = nn.Sequential(Keeps())
    model(torch.ones(4, 3)).sum().backward()
    twin = copy_model(model)
    assert twin[0] is not model[0] and torch.equal(twin[0].aux_loss, model[0].aux_loss)
    assert twin[0].aux_loss.is_leaf and model[0].aux_loss.grad_fn is not None
    assert twin[0].seen["outputs"][1].is_leaf and twin[0].seen["outputs"] is not model[0].seen["outputs"]
    assert all(one is not other and torch.equal(one, other) for one, other in zip(twin.parameters(), model.parameters(), strict=True))  # fmt: skip


def test_shared_tensors_are_the_model_s_own() -> None:
    model = Keeps()
    twin = copy_model(model, shared=model.parameters())
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()] and twin is not model


def test_an_optimizer_of_scalars_alone_takes_none_of_them() -> None:
    """A rank that does not hold a scalar, a temperature in a group of its own, steps on an empty vector."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        assert accepts_empty_tensor(kind([nn.Parameter(torch.tensor(1.0))], lr=0.1))
        assert accepts_empty_tensor(kind([{"params": [nn.Linear(3, 2).weight]}, {"params": [nn.Parameter(torch.tensor(1.0))]}], lr=0.1))  # fmt: skip
