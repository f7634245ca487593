"""Stages of models that checkpoint their own blocks or pass values by hooks, and a loss scale on them."""

import copy
import json
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.process_group import World
from paceline.config.layout import parse_layout
from paceline.config.settings import PlacementSettings
from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import NoChain
from paceline.parallel.pipeline.chain.split import plan_stage_split
from paceline.parallel.pipeline.chain.stages import StageOutput, Stages
from paceline.parallel.pipeline.graph.stages import GraphStages
from paceline.parallel.pipeline.pipeline_model import build_pipeline_model
from paceline.parallel.pipeline.stagewise_check import compare_stagewise
from paceline.planner.layout.mesh import Mesh
from paceline.trainer.setup.optimizers import make_scaler
from tests.conftest import Shop
from tests.parallel.pipeline.stages_in_one_process import Ranks, alone

SEEN: ContextVar[list[Tensor]] = ContextVar("seen")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.two(torch.tanh(self.one(x))))


class Chain(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.enter, self.blocks, self.head = nn.Linear(5, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.enter, x, use_reentrant=False)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Caught(Chain):
    """As encoders of several resolutions do: a hook on each block catches what it gives, and the head mixes them."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _, __, output: SEEN.get().append(output))
        self.mix = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        SEEN.set([])
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        found = [each(seen) for each, seen in zip(self.mix, SEEN.get(), strict=True)]
        return self.head(torch.stack(found).sum(0))


def loss(model: nn.Module, microbatch: int) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(microbatch))
    out: Tensor = model(x)
    return out.square().sum()


def test_stages_of_checkpointed_blocks_have_the_gradients_of_one_process() -> None:
    torch.manual_seed(0)
    model = Chain()
    cut = plan_stage_split(model, num_stages=3, call=lambda: loss(model, 0))
    compare_stagewise(model, split=cut, call=lambda: loss(model, 0))
    losses, right, _ = alone(model, loss=loss, num_micro=2)
    ranks = Ranks(model, cut=cut, loss=loss, staged=lambda each, index: Stages(each, split=cut, owned_stages=[index]))
    assert all(torch.equal(ranks.train(number), whole) for number, whole in enumerate(losses))
    found = ranks.gradients()
    assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # what planning runs has no gradients
def test_a_checkpoint_that_no_gradient_comes_back_through_is_refused() -> None:
    model = Chain(reentrant=True)
    cut = plan_stage_split(model, num_stages=2, call=lambda: loss(model, 0))
    ranks = Ranks(model, cut=cut, loss=loss, staged=lambda each, index: Stages(each, split=cut, owned_stages=[index]))
    with pytest.raises(LayoutError, match=r"checkpoints blocks\.0 with use_reentrant=True"):
        ranks.stages[1].check_trainable()  # seen when the model was cut, by the first process that looks
    with pytest.raises(LayoutError, match=r"checkpoints blocks\.0 with use_reentrant=True"):
        ranks.train(0)
    with torch.no_grad():
        ranks.forward(0)  # nothing has to come back


class Reversed(torch.autograd.Function):
    """What other libraries' checkpoints are: a forward without a graph, and a backward that runs it again."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(x), gradient)
        return None, x.grad


class Recomputed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.enter(x))
        for block in self.blocks[1:]:
            x = Reversed.apply(block, x)
        return self.head(x)


def test_a_block_that_an_autograd_function_calls_is_refused_by_name_before_a_step() -> None:
    model, plain = Recomputed(), Chain()
    cut = plan_stage_split(model, num_stages=2, call=lambda: loss(model, 0))
    assert cut.enclosed_block == ("blocks.1", "Reversed")
    with pytest.raises(LayoutError, match=r"calls blocks\.1 inside the autograd function Reversed"):
        Stages(model, split=cut, owned_stages=[0]).check_trainable()
    cut = plan_stage_split(plain, num_stages=2, call=lambda: loss(plain, 0))
    assert cut.enclosed_block is None
    Stages(plain, split=cut, owned_stages=[0]).check_trainable()


class Attending(Chain):
    """Attention, which torch says may draw; and with `noise` one that draws in evaluation: in and between its blocks."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        for block in self.blocks:
            block.drop.training = block.drop.training or self.noise > 0
            x = block(x) + (self.noise * torch.rand(()) if self.noise else 0.0)
        return self.head(x)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_cut_is_compared_with_the_whole_model_whatever_it_draws(noise: float) -> None:
    model = Attending(noise)
    cut = plan_stage_split(model, num_stages=3, call=lambda: loss(model, 0))
    compare_stagewise(model, split=cut, call=lambda: loss(model, 0))
    wrong = iter([0.0, 1.0, 1.0, 1.0])  # as if another result came of the stages
    with pytest.raises(NoChain, match="returns a different result than when run whole"):
        compare_stagewise(model, split=cut, call=lambda: loss(model, 0) + next(wrong))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_stages_draw_in_evaluation_what_one_process_draws(noise: float) -> None:
    model = Attending(noise).eval()
    cut = plan_stage_split(model, num_stages=3, call=lambda: loss(model, 0))
    model.eval()
    parts = [copy.deepcopy(model) for _ in cut.stages]
    stages = [Stages(each, split=cut, owned_stages=[index]) for index, each in enumerate(parts)]
    with torch.no_grad():
        torch.manual_seed(5)
        right, sent = loss(model, 0), None
        for index, each in enumerate(stages):
            torch.manual_seed(5)  # each rank has a generator of its own
            given = None if sent is None else sent.as_stage_input()
            sent = each.run(index, given, lambda index=index: loss(parts[index], 0))
            assert not isinstance(sent, StageOutput) or sent.spec[1] is int(noise > 0), "nothing is sent for nothing"
    assert torch.equal(sent, right)


class Looking(Chain):
    """Code between the blocks that looks at what one block's norm has written: copies of the whole do too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        for block in self.blocks:
            block.one = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "copy":
            teacher = copy.deepcopy(self)
            teacher.how = ""
            with torch.no_grad():
                return self.plain(x) - teacher.eval()(x)
        if self.how == "state":
            return self.plain(x) + sum(value.double().mean() for value in self.state_dict().values())
        if self.how == "statistics":
            return self.plain(x) + self.blocks[0].one[1].get_buffer("running_mean").mean()
        return self.plain(x)

    def plain(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


@pytest.mark.parametrize("how", ["copy", "state", "statistics"])
def test_statistics_that_are_read_outside_of_their_block_are_refused_by_name(how: str) -> None:
    model = Looking(how)
    said = r"reads the buffer blocks\.\d\.one\.1\.\w+ outside of its block, but only stage \d has"
    with pytest.raises(NoChain, match=said):
        plan_stage_split(model, num_stages=2, call=lambda: loss(model, 0))
    other = Looking("")
    assert plan_stage_split(other, num_stages=2, call=lambda: loss(other, 0)).num_stages == 2


def test_what_hooks_catch_of_blocks_is_cut_along_the_graph() -> None:
    model, other = Caught().eval(), Caught().eval()
    cut = plan_stage_split(model, num_stages=2, call=lambda: loss(model, 0))
    with pytest.raises(NoChain, match=r"needs more than its blocks return: stage 1, .* ends with ValueError"):
        compare_stagewise(model, split=cut, call=lambda: loss(model, 0))
    told: list[str] = []
    how: dict[str, Any] = {"layout": parse_layout("pp=2"), "mesh": Mesh(pp=2), "world": World.alone()}
    piped = build_pipeline_model(
        model, call=lambda: loss(model, 0), settings=PlacementSettings(), report=told.append, **how
    )
    assert isinstance(piped.stages, GraphStages) and "the forward needs more than its blocks return" in told[0]
    with pytest.raises(LayoutError, match="needs more than its blocks return"):
        build_pipeline_model(other, call=lambda: loss(other, 0), settings=PlacementSettings(cut="chain"), **how)


def test_a_stage_without_a_loss_has_the_scale_too() -> None:
    parts: Any = SimpleNamespace(is_unsharded=False)
    scaler = make_scaler(parts, World.alone(), init_scale=8.0)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for gradient, after in ((torch.tensor([8.0, torch.inf]), [1.0, 1.0]), (torch.tensor([4.0, 8.0]), [0.0, -1.0])):
        parameter.grad = gradient
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == after and scaler.get_scale() == 4.0


LAST = "checkpoints/step-00000012"
JOB = """
import torch, torch.nn as nn
import paceline as pl

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))

x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
job = pl.Job(
    model=lambda: nn.Sequential(*(Block() for _ in range(4))),
    loss=lambda output, batch: (10 * (output - 1).square().sum(), output.numel()),
    count=lambda batch: batch[0].numel(),
    train_data=torch.utils.data.TensorDataset(x, x),
    optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    global_batch_size=8,
)
"""


@pytest.mark.parametrize("layout", ["pp", pytest.param("pp,schedule=zbv", marks=pytest.mark.soak)])
def test_an_overflow_on_one_stage_is_every_stage_s(shop: Shop, layout: str) -> None:
    """The first steps overflow at torch's first scale: skipped on all stages, and the rest is one process's training."""
    shop.write("job.py", JOB)
    words = ("--train.precision", "fp16", "--train.micro_batch_size", "4")
    assert shop.train("one", *words, "--layout", "single", ranks=1, steps=12).code == 0
    assert shop.train("two", *words, "--layout", layout, steps=12).code == 0
    assert shop.digest("two") == shop.digest("one")
    bodies = [json.loads((shop.path / run / LAST / "manifest.json").read_text())["body"] for run in ("one", "two")]
    scales = [json.loads(body)["state"]["scaler"]["scale"] for body in bodies]
    assert 1.0 < scales[0] == scales[1] < 65536
    lines = (shop.path / "two" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if '"loss"' in line]
    assert losses[-1] < losses[0], "the last steps were taken"
