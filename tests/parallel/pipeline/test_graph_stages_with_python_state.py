"""Python side effects of a forward are in no exported graph: graph stages refuse them by name or keep them."""

from collections import deque
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.errors import LayoutError
from paceline.parallel.module_access.user_call_isolation import plain_state
from paceline.parallel.pipeline.graph.cut_points import plan_graph
from paceline.parallel.pipeline.graph.stages import GraphStages
from tests.parallel.pipeline.stages_in_one_process import Ranks, alone

WIDTH = 4
SEEN: list[int] = []


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.scale, self.calls = nn.Linear(WIDTH, WIDTH), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.line(x) * self.scale
        return found


HOOKS_ONCE = ("hears", "hears, and sets once", "hooks once")
HEARD: ContextVar[list[Tensor]] = ContextVar("heard")


class Model(nn.Module):
    """`a`, `norm` and `b` stay whole; what the forward does between their calls is drawn by `what`."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = Part(), nn.BatchNorm1d(WIDTH), Part(), nn.Linear(WIDTH, WIDTH)
        self.what, self.step, self.first = what, 0, True
        self.state: Any = {
            "an object": SimpleNamespace(step=0), "in a dict": {"n": {"m": 0}}, "a deque": deque(maxlen=3), "a set": set()
        }.get(what)  # fmt: skip
        self.register_buffer("seen", torch.ones(()))
        if what == "thaws":
            self.a.requires_grad_(False)

    def before(self, x: Tensor) -> Tensor:
        if self.what == "anneals":
            self.step += 1
            return x * 0.9**self.step
        if self.what == "nothing at first":
            self.state = (self.state or 0) + 1
        if self.what == "an object":
            self.state.step += 1
        if self.what == "in a dict":
            self.state["n"]["m"] += 1
        if self.what == "a deque":
            self.state.append(len(self.state))
        if self.what == "a set":
            self.state.add(len(self.state))
        if self.what == "first time":
            x, self.first = (x * 2 if self.first else x), False
        if self.what == "kept once":
            self.width = x.shape[1]
        if self.what == "prints":
            print("here")
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.what == "a global":
            SEEN.append(1)
        if self.what == "a buffer":
            self.seen = self.seen * 0.5
            x = x * self.seen
        if self.what in ("thaws", "freezes"):
            self.a.requires_grad_(self.what == "thaws")
        if self.what == "hooks":
            self.a.register_forward_hook(lambda _, __, output: output * 2)
        HEARD.set([])
        if self.what in HOOKS_ONCE and not hasattr(self, "is_hooked"):  # transformers: hidden states
            self.is_hooked = True
            if self.what == "hears, and sets once":
                self.b.scale = 0.5
            says = self.what == "hooks once"
            self.a.register_forward_hook(lambda _, __, y: y * 2 if says else HEARD.get().append(y))
        x = self.norm(self.a(x))
        if self.what == "sets":
            self.b.scale = 0.5
        if self.what == "different weights":
            return self.c(functional_call(self.b, {n: p * 0.9 for n, p in self.b.named_parameters()}, (x,)))
        if self.what == "own weights":
            return self.c(functional_call(self.b, dict(self.b.named_parameters()), (x,)))
        x = self.b(x)
        if self.what == "sets afterwards":
            self.b.scale *= 0.5
        found: Tensor = self.c(x)
        return found + HEARD.get()[0] if HEARD.get() else found


BLOCKS = ["a", "norm", "b", "c"]
REFUSED = {
    "anneals": "changes self.step,",
    "nothing at first": "changes self.state,",
    "an object": "changes self.state,",
    "in a dict": "changes self.state,",
    "a deque": "changes self.state,",
    "a set": "changes self.state,",
    "first time": "changes self.first,",
    "a global": "changes SEEN,",
    "thaws": r"sets self.a.line.weight.requires_grad between",
    "freezes": r"sets self.a.line.weight.requires_grad between",
    "hooks": r"sets self.a.register_hook between",
    "hooks once": r"sets self.a.register_hook between",
    "hears, and sets once": r"sets self.b.scale between",
    "sets": r"sets self.b.scale between",
    "sets afterwards": r"sets self.b.scale between",
    "different weights": r"sets self.b.line.weight between",
}


def loss(model: nn.Module, microbatch: int) -> Tensor:
    found: Tensor = model(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(microbatch))).square().sum()
    return found


@pytest.mark.parametrize("what", REFUSED)
def test_what_python_does_beside_the_operations_is_refused_by_name(what: str) -> None:
    model = Model(what)
    with pytest.raises(LayoutError, match=REFUSED[what]):
        plan_graph(model, num_stages=2, call=lambda: loss(model, 0), blocks=BLOCKS)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("what", ["plain", "kept once", "own weights", "a buffer", "prints", "hears"])
def test_what_a_graph_keeps_or_does_not_need_is_one_process_s_training(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Model(what)
    plan = plan_graph(model, num_stages=2, call=lambda: loss(model, 0), blocks=BLOCKS)
    assert plan.has_print_calls is (what == "prints")
    losses, right, buffers = alone(model, loss=loss, num_micro=3)
    staged = lambda each, index: GraphStages(each, split=plan.split, owned_stages=[index], empty_model=plan.empty_model)  # noqa: E731
    ranks = Ranks(model, cut=plan.split, loss=loss, staged=staged)
    assert [ranks.train(number).item() for number in range(3)] == [one.item() for one in losses]
    found = ranks.gradients()
    assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
    assert torch.equal(ranks.models[0].seen, buffers["seen"])  # type: ignore[arg-type]
    assert all(ranks.models[stage].get_submodule(name).calls for name, stage in (("a", 0), ("b", 1)))
    capsys.readouterr()


def test_what_modules_keep_is_compared_by_value_and_not_by_identity() -> None:
    one, other = Model("an object"), Model("an object")
    names = {"": one}
    assert plain_state(names) == plain_state({"": other})
    one.state.me = one.state  # one that holds itself
    before = plain_state(names)
    assert before == plain_state(names) != plain_state({"": other})
    one.state.step = float("nan")
    assert plain_state(names) == plain_state(names) != before
