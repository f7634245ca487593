"""A model without a chain, cut along its exported graph, is the same model: losses, gradients, draws, buffers, names."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.place.graph_plan import GraphPlan, plan_graph
from paceline.place.graph_stages import GraphStages
from paceline.place.hollow import hollow_parameters
from paceline.place.stages import Sent
from paceline.streams import Streams
from tests.parity.graph_models import CASES, built

MICRO = 4


def streamed(model: nn.Module) -> Streams:
    streams = Streams(seed=3)
    streams.arm(model)
    return streams


def whole(name: str, model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """One process: each microbatch's loss, the sums of gradients, and the buffers."""
    model = copy.deepcopy(model)
    streams, losses = streamed(model), []
    for microbatch in range(MICRO):
        streams.enter(step=0, microbatch=microbatch)
        losses.append(CASES[name].loss(model, microbatch))
        losses[-1].backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, dict(model.named_buffers())


class Ranks:
    """Every stage in a model object of its own, as on ranks of their own, in one process."""

    def __init__(self, name: str, model: nn.Module, plan: GraphPlan) -> None:
        self.name, self.cut = name, plan.cut
        self.models = [copy.deepcopy(model) for _ in plan.cut.parts]
        self.streams = [streamed(each) for each in self.models]
        self.stages = [
            GraphStages(each, cut=plan.cut, own=[index], bare=plan.bare)
            for index, each in enumerate(self.models)
        ]

    def forward(self, microbatch: int) -> tuple[list[Any], list[Sent | None]]:
        received, sent, taken = None, [], []
        for index, stages in enumerate(self.stages):
            self.streams[index].enter(step=0, microbatch=microbatch)
            taken.append(received)
            output = stages.run(index, received, lambda m=self.models[index]: CASES[self.name].loss(m, microbatch))
            sent.append(output)
            received = output.received() if isinstance(output, Sent) else None
        return sent, taken

    def train(self, microbatch: int) -> Tensor:
        sent, taken = self.forward(microbatch)
        sent[-1].backward()
        for out, then in zip(sent[-2::-1], taken[:0:-1], strict=True):
            pairs = [(t, r.grad) for t, r in zip(out.tensors, then.tensors, strict=True) if r.grad is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return sent[-1]

    def gradients(self) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for part, model in zip(self.cut.parts, self.models, strict=True):
            for name, p in model.named_parameters():
                if p.grad is not None:
                    assert name in part.parameters
                    total[name] = total[name] + p.grad if name in total else p.grad
        return total


def planned(name: str, num_stages: int, **how: Any) -> tuple[nn.Module, GraphPlan]:
    model = built(name)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    plan = plan_graph(model, num_stages=num_stages, call=lambda: CASES[name].loss(model, 0), **how)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items()), "cutting leaves no trace"
    return model, plan


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", list(CASES))
def test_stages_along_the_graph_are_the_whole_model(name: str, num_stages: int) -> None:
    model, plan = planned(name, num_stages)
    losses, right, buffers = whole(name, model)
    ranks = Ranks(name, model, plan)
    for microbatch, loss in enumerate(losses):
        assert torch.equal(ranks.train(microbatch), loss)
    found = ranks.gradients()
    assert found.keys() == right.keys()
    for n, gradient in right.items():
        if n in plan.cut.ties:
            assert (found[n] - gradient).norm() <= 1e-6 * gradient.norm(), n
        else:
            assert torch.equal(found[n], gradient), n
    for part, each in zip(plan.cut.parts, ranks.models, strict=True):
        assert each.state_dict().keys() == model.state_dict().keys()
        assert {n for n, p in each.named_parameters() if p in hollow_parameters(each, cut=plan.cut, own=[part.index])} == {
            n for n, p in each.named_parameters() if p.is_meta
        }
    for n, buffer in buffers.items():
        stages = [i for i, part in enumerate(plan.cut.parts) if any(n.startswith(f"{m}.") for m in part.modules)]
        home = plan.cut.buffers.get(n, *stages)
        assert torch.equal(dict(ranks.models[home].named_buffers())[n], buffer), n
