"""A model cut into stages equals the whole: outputs, gradients, random draws, names; other models are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import LayoutError, RunError
from paceline.parallel.module_access.blocks import find_blocks
from paceline.parallel.pipeline.chain.split import StageSplit, plan_stage_split
from paceline.parallel.pipeline.chain.stages import Stages
from paceline.parallel.pipeline.free_memory import absent_parameters
from paceline.parallel.pipeline.stagewise_check import compare_stagewise
from paceline.planner.model_costs.stage_balance import balance_stages
from paceline.profiling.model_tracing.block_timer import time_blocks
from tests.parallel.pipeline.chain_models import CASES, HF, OWN, Block, Nano, Pair, built
from tests.parallel.pipeline.stages_in_one_process import Ranks, alone, streamed

HF_SLOW = [
    pytest.param(n, s, marks=[] if (n, s) in (("t5", 4), ("gpt2", 3)) else pytest.mark.soak)
    for n in HF
    for s in (2, 3, 4)
]


def whole(name: str, model: nn.Module, num_micro: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    losses, gradients, _ = alone(model, loss=CASES[name].loss, num_micro=num_micro)
    return losses, gradients


def cutout(name: str, model: nn.Module, cut: StageSplit) -> Ranks:
    staged = lambda each, index: Stages(each, split=cut, owned_stages=[index])  # noqa: E731
    return Ranks(model, cut=cut, loss=CASES[name].loss, staged=staged)


def check(name: str, num_stages: int) -> StageSplit:
    model = built(name)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    cut = plan_stage_split(model, num_stages=num_stages, call=lambda: CASES[name].loss(model, 0))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items()), "cutting leaves no trace"
    losses, right = whole(name, model, 3)
    staged = cutout(name, model, cut)
    for microbatch, loss in enumerate(losses):
        assert torch.equal(staged.train(microbatch), loss)
    found = staged.gradients()
    assert found.keys() == right.keys()
    for n, gradient in right.items():
        if n in cut.ties or n in CASES[name].rounded:
            assert (found[n] - gradient).norm() <= 1e-6 * gradient.norm(), n
        else:
            assert torch.equal(found[n], gradient), n
    for part, each in zip(cut.stages, staged.models, strict=True):
        assert each.state_dict().keys() == before.keys()
        held = sum(p.untyped_storage().nbytes() for p in each.parameters() if p.device.type != "meta")
        own = sum(p.numel() * 4 for n, p in model.named_parameters() if n in part.parameters)
        assert own <= held <= own + 64, "memory of what a stage does not hold is given up"
        assert {
            n for n, p in each.named_parameters() if p in absent_parameters(each, split=cut, owned_stages=[part.index])
        } == {n for n, _ in each.named_parameters() if n not in part.parameters}
    return cut


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("name", list(OWN))
def test_stages_are_the_whole_model(name: str, num_stages: int) -> None:
    check(name, num_stages)


@pytest.mark.parametrize(("name", "num_stages"), HF_SLOW)
@pytest.mark.filterwarnings("ignore")
def test_stages_of_unmodified_transformers(name: str, num_stages: int) -> None:
    cut = check(name, num_stages)
    if name in ("gpt2", "bert", "llama-tied"):
        assert list(cut.ties.values()) == [(0, num_stages - 1)]
    if name == "t5" and num_stages == 4:
        assert len(cut.skip_values) == 1, "the encoder's output goes along"


def test_several_stages_of_one_process_share_the_model() -> None:
    model = built("nano")
    cut = plan_stage_split(model, num_stages=4, call=lambda: CASES["nano"].loss(model, 0))
    losses, right = whole("nano", model, 1)
    streams = streamed(model)
    stages = Stages(model, split=cut, owned_stages=[0, 1, 2, 3])
    received: Any = None
    outputs = []
    for index in range(4):
        streams.enter(step=0, microbatch=0)
        received = stages.run(index, received, lambda: CASES["nano"].loss(model, 0))
        outputs.append(received)
    assert torch.equal(outputs[-1], losses[0])
    outputs[-1].backward()
    for n, p in model.named_parameters():
        assert torch.equal(p.grad, right[n]) or n in cut.ties, n
    streams.enter(step=0, microbatch=0)
    assert torch.equal(CASES["nano"].loss(model, 0), losses[0]), "outside of a stage it is the plain model"


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
def test_blocks_compiled_after_the_cut_stay_in_their_stage() -> None:
    model = built("nano")
    losses, right = whole("nano", model, 1)
    cut = plan_stage_split(model, num_stages=2, call=lambda: CASES["nano"].loss(model, 0))
    staged = cutout("nano", model, cut)
    for each in staged.models:
        for block in each.blocks:
            block.compile(backend="eager")
    assert torch.equal(staged.train(0), losses[0])
    assert all(torch.equal(g, right[n]) for n, g in staged.gradients().items() if n not in cut.ties)


def test_a_model_in_stages_is_not_called_by_mistake() -> None:
    model = built("nano")
    cut = plan_stage_split(model, num_stages=2, call=lambda: CASES["nano"].loss(model, 0))
    Stages(model, split=cut, owned_stages=[1])
    with pytest.raises(RunError, match=r"tokens was called, but this process holds the stages \[1\] of 2"):
        CASES["nano"].loss(model, 0)


def test_blocks_are_found_by_structure_or_listed() -> None:
    assert [b.name for b in find_blocks(built("nano"))] == [f"blocks.{i}" for i in range(4)]
    assert [b.name for b in find_blocks(built("cnn"))] == [str(i) for i in range(9)]
    assert [b.name for b in find_blocks(built("cnn"), listed_names=["0", "4", "8"])] == ["0", "4", "8"]


class Unet(nn.Module):
    def __init__(self, *, as_argument: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Up() for _ in range(4))
        self.as_argument = as_argument

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        skip = x
        x = self.blocks[2](self.blocks[1](x))
        return self.blocks[3](x, skip) if self.as_argument else self.blocks[3](x + skip)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + (0 if skip is None else skip)


class Early(Nano):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 1e9:
                break
        return self.head(x)


class Collected(Nano):
    def forward(self, ids: Tensor) -> Tensor:
        x, seen = self.tokens(ids), []
        for block in self.blocks:
            x = block(x)
            seen.append(x.mean())
        return self.head(x) * torch.stack(seen).sum()


class Shared(Nano):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(3):
            x = self.blocks[0](x)
        return self.head(x)


class Skips(Nano):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](self.tokens(ids))))


class Hidden(Nano):
    """One block leaves a value for another where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda module, args, out: setattr(self, "kept", out * 2))
        self.blocks[3].register_forward_hook(lambda module, args, out: out + self.kept)


REFUSED: list[tuple[str, Callable[[], nn.Module], str]] = [
    (
        "skip",
        Unet,
        r"a skip connection crosses the cut before blocks.2: an input of blocks.3 needs a value \(\w+\) made in blocks.0",
    ),
    ("branch", Early, r"the forward branches on a value that stage blocks.2..blocks.3 does not have"),
    ("collected", Collected, r"the code after the last block needs a value \(\w+\) made in blocks.0"),
    ("shared", Shared, "the block blocks.0 is called twice"),
    ("not called", Skips, "the forward does not call the block blocks.2"),
    ("hidden", Hidden, r"add inside blocks.3 needs a value \(mul\) made in blocks.0"),
    ("no blocks", lambda: nn.Linear(4, 4), "no chain of blocks"),
]


@pytest.mark.parametrize(("make", "says"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_can_not_be_cut_is_refused_by_name(make: Callable[[], nn.Module], says: str) -> None:
    model = make()
    x = torch.zeros(2, 4) if isinstance(model, Unet | nn.Linear) else torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(LayoutError, match=says):
        plan_stage_split(model, num_stages=2, call=lambda: model(x).sum())


def test_numbers_that_do_not_fit_are_refused() -> None:
    model = built("nano")
    for settings, says in (
        ({"num_stages": 5}, "5 stages, but the model has only 4 blocks"),
        ({"num_stages": 2, "bounds": [1, 2]}, r"place.stages lists 2 stages with 3 blocks"),
        ({"num_stages": 2, "blocks": ["nowhere"]}, "no module of that name"),
        ({"num_stages": 2, "blocks": ["blocks.0", "blocks.0.mix"]}, "'blocks.0', which contains it"),
        ({"num_stages": 2, "weights": [1.0]}, "1 weights for 4 blocks"),
    ):
        with pytest.raises(LayoutError, match=says):
            plan_stage_split(model, call=lambda: CASES["nano"].loss(model, 0), **settings)


def test_a_skip_connection_that_is_an_argument_is_carried() -> None:
    torch.manual_seed(0)
    model = Unet(as_argument=True)
    x = torch.randn(2, 4)
    cut = plan_stage_split(model, num_stages=4, call=lambda: model(x).sum())
    assert [part.received_skips for part in cut.stages] == [(), (0,) * 0, (0,), (0,)] or len(cut.skip_values) == 1
    right = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    CASES["unet"] = type(OWN["nano"])(Unet, lambda m, j: m(x).sum())
    try:
        staged = cutout("unet", model, cut)
        staged.train(0)
    finally:
        del CASES["unet"]
    found = staged.gradients()
    for (name, _), gradient in zip(model.named_parameters(), right, strict=True):
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm()


def test_listed_bounds_and_weights_are_kept() -> None:
    model = built("nano")
    run = lambda: CASES["nano"].loss(model, 0)  # noqa: E731
    assert plan_stage_split(model, num_stages=2, call=run, bounds=[1, 3]).bounds == ((0, 1), (1, 4))
    assert plan_stage_split(model, num_stages=2, call=run, weights=[5.0, 1, 1, 1]).bounds == ((0, 1), (1, 4))
    assert isinstance(Pair(), nn.Module) and isinstance(Block(4, 0.0), nn.Module)


@pytest.mark.parametrize("name", list(OWN))
def test_a_rehearsal_agrees_and_leaves_no_trace(name: str) -> None:
    model = built(name)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    cut = plan_stage_split(model, num_stages=3, call=lambda: CASES[name].loss(model, 0))
    compare_stagewise(model, split=cut, call=lambda: CASES[name].loss(model, 0))
    assert model.training and all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_a_rehearsal_finds_a_value_that_does_not_cross() -> None:
    model, x = Unet(), torch.ones(2, 4)
    plain = lambda: model.blocks[3](model.blocks[2](model.blocks[1](model.blocks[0](x)))).sum()  # noqa: E731
    cut = plan_stage_split(model, num_stages=2, call=plain)
    compare_stagewise(model, split=cut, call=plain)
    with pytest.raises(
        LayoutError, match=r"a different result than when run whole: the result is NaN, because a stage reads a value"
    ):
        compare_stagewise(model, split=cut, call=lambda: model(x).sum())


def test_blocks_are_timed_and_the_slow_one_stands_alone() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(16, 3000), nn.Linear(3000, 16))
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), wide, *(nn.Linear(16, 16) for _ in range(2)))
    x = torch.randn(400, 16)
    times = time_blocks(
        model, blocks={b.name: b.module for b in find_blocks(model)}, call=lambda: model(x).square().sum()
    )
    assert times.names == tuple("012345") and all(p.grad is None for p in model.parameters())
    seconds = times.block_seconds
    assert seconds[3] > 4 * max(seconds[:3] + seconds[4:]) and min(times.forward + times.backward) > 0
    assert balance_stages(num_stages=3, seconds=seconds).bounds == ((0, 3), (3, 4), (4, 6))
