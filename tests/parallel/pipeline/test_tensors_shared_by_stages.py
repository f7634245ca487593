"""Stages whose blocks share buffers and weights each keep what their own blocks compute with."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.parallel.pipeline.chain.split import plan_stage_split
from paceline.parallel.pipeline.chain.stages import Stages
from paceline.parallel.pipeline.graph.cut_points import plan_graph
from paceline.parallel.pipeline.graph.stages import GraphStages
from tests.parallel.pipeline.stages_in_one_process import Ranks, alone

WIDTH = 8


class Rope(nn.Module):
    """Turns pairs of features by their place."""

    def __init__(self, *, persistent: bool = True, is_complex: bool = False, buffer: Tensor | None = None) -> None:
        super().__init__()
        angles = torch.arange(5.0)[:, None] * torch.linspace(1.0, 0.1, WIDTH // 2)
        table = torch.polar(torch.ones_like(angles), angles) if is_complex else angles
        self.register_buffer("table", table if buffer is None else buffer, persistent=persistent)

    def forward(self, h: Tensor) -> Tensor:
        table = self.get_buffer("table")
        turned = torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous())
        table = table if table.is_complex() else torch.polar(torch.ones_like(table), table)
        return torch.view_as_real(turned * table).flatten(-2)


class Block(nn.Module):
    """`rope` is a module of this one, or hidden in a list."""

    def __init__(self, rope: nn.Module, *, hides: bool = False) -> None:
        super().__init__()
        self.line, self.hidden = nn.Linear(WIDTH, WIDTH), [rope]
        if not hides:
            self.rope, self.hidden = rope, []

    def forward(self, h: Tensor) -> Tensor:
        rope = self.hidden[0] if self.hidden else self.rope
        return h + torch.tanh(self.line(rope(h)))


class Tied(nn.Module):
    """A head that holds the embedding in a list."""

    def __init__(self, owner: nn.Embedding) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, h: Tensor) -> Tensor:
        return nn.functional.linear(h, self.owner[0].weight)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        first = Rope(persistent=kind != "not persistent", is_complex=kind == "complex")
        ropes: list[nn.Module] = [first] * 4
        if kind == "one tensor":
            ropes = [Rope(buffer=first.get_buffer("table")) for _ in range(4)]
        if kind == "views":
            ropes = [Rope(buffer=first.get_buffer("table")[:]) for _ in range(4)]
        if kind == "also outside":
            self.rope = first
        self.kind = kind
        hides = kind == "hidden module"
        self.blocks = nn.ModuleList(Block(rope, hides=hides and place > 0) for place, rope in enumerate(ropes))
        self.head = Tied(self.embed) if kind == "hidden head" else nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        if self.kind == "also outside":
            h = self.rope(h)
        for block in self.blocks:
            h = block(h)
        found: Tensor = self.head(h)
        return found


KINDS = ("module", "not persistent", "complex", "one tensor", "views", "also outside", "hidden module", "hidden head")
DAILY = {("chain", kind) for kind in KINDS} | {("graph", kind) for kind in ("module", "hidden module", "hidden head")}


def loss(model: nn.Module, microbatch: int) -> Tensor:
    ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(microbatch))
    found: Tensor = model(ids).square().sum()
    return found


def ranks(model: nn.Module, way: str, *, num_stages: int = 3) -> Ranks:
    if way == "chain":
        cut = plan_stage_split(model, num_stages=num_stages, call=lambda: loss(model, 0))
        return Ranks(
            model, cut=cut, loss=loss, staged=lambda each, index: Stages(each, split=cut, owned_stages=[index])
        )
    plan = plan_graph(model, num_stages=num_stages, call=lambda: loss(model, 0))
    staged = lambda each, index: GraphStages(each, split=plan.split, owned_stages=[index], empty_model=plan.empty_model)  # noqa: E731
    return Ranks(model, cut=plan.split, loss=loss, staged=staged)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(way, kind, marks=[] if (way, kind) in DAILY else pytest.mark.soak)
        for way in ("chain", "graph")
        for kind in KINDS
    ],
)
def test_stages_keep_what_their_blocks_share(way: str, kind: str) -> None:
    torch.manual_seed(0)
    model = Model(kind)
    losses, right, _ = alone(model, loss=loss, num_micro=2)
    staged = ranks(model, way)
    for microbatch, value in enumerate(losses):
        assert torch.equal(staged.train(microbatch), value)
    found = staged.gradients()
    assert found.keys() == right.keys()
    for name, gradient in right.items():  # a tie over stages is added in another order
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
    assert all(p.is_meta for n, p in staged.models[0].named_parameters() if n.startswith("blocks.3")), "memory is freed"


class Counts(Rope):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.get_buffer("seen").add_(1)
        return super().forward(h)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, h: Tensor) -> Tensor:
        found: Tensor = self.norm(h)
        return found


@pytest.mark.parametrize(("rope", "said"), [(Counts, "rope.seen"), (Normed, "rope.norm.num_batches_tracked")])
def test_a_buffer_that_several_stages_write_is_refused_by_name(rope: Any, said: str) -> None:
    model = Model("module")
    model.blocks = nn.ModuleList(Block(one) for one in [rope()] * 4)
    with pytest.raises(LayoutError, match=f"stages 0, 1, 2 use the buffer blocks.0.{said}, and their forward writes"):
        ranks(model, "chain")


class Twice(nn.Module):
    """Its modules are called twice, the second time set otherwise."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.b(self.norm(self.a(x)))
        before = getattr(self.norm, self.what)
        setattr(self.norm, self.what, False if isinstance(before, bool) else 0.5)
        second: Tensor = self.norm(x)
        setattr(self.norm, self.what, before)
        return first + second


@pytest.mark.parametrize("what", ["training", "track_running_stats", "momentum"])
def test_what_a_forward_sets_between_calls_is_refused_along_a_graph(what: str) -> None:
    model = Twice(what)
    with pytest.raises(LayoutError, match=f"sets self.norm.{what} between calls"):
        plan_graph(model, num_stages=2, call=lambda: model(torch.randn(3, WIDTH)))
    assert not any(module._forward_pre_hooks for module in model.modules())
