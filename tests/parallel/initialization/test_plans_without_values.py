"""Plans from a model without values equal those from the whole model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.settings import PlacementSettings
from paceline.errors import LayoutError
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.initialization.deferred_init import defer_large_model
from paceline.parallel.initialization.meta_forward import UnknownNumber, meta_forward
from paceline.parallel.initialization.meta_model import named_tensors, tensor_bytes
from paceline.parallel.pipeline.chain.split import plan_stage_split
from paceline.parallel.tensor_parallel.auto_plan import choose_plan
from paceline.parallel.trace_example_forward import make_block_timer
from paceline.step.loss.loss_return_value import LossContract
from paceline.trainer.checks.example_batch import ExampleBatch
from paceline.trainer.setup.build_training_setup import build_model
from tests.matrix.matrix_cases import MODELS, make
from tests.matrix.matrix_worker import ready_of
from tests.parallel.initialization.peak_memory_job import Block

ALONE = World.alone()
Ways = dict[str, tuple[nn.Module, Callable[[Callable[[], Any]], Any], DeferredModel | None]]


def late_of(build: Callable[[], nn.Module]) -> DeferredModel:
    made = defer_large_model(build, seed=0, world=ALONE, limit_bytes=1000)
    assert made is not None
    return DeferredModel(deferred_init=made, device=ALONE.device)


def ways(build: Callable[[], nn.Module]) -> Ways:
    """The whole model, one that is sketched, one that is lent its parameters, and how each makes a plan."""
    sketched, lent = late_of(build), late_of(build)

    def sketch(work: Callable[[], Any]) -> Any:
        with meta_forward(ALONE.device):
            return work()

    return {
        "whole": (build(), lambda work: work(), None),
        "sketched": (sketched.deferred_init.model, sketch, sketched),
        "lent": (lent.deferred_init.model, lent.run_with_values, lent),
    }


def told(work: Callable[[], Any]) -> Any:
    """What was found, or the refusal."""
    try:
        return work()
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize(
    "model",
    ["text", *(pytest.param(name, marks=pytest.mark.soak) for name in MODELS if name not in ("text", "mixtral"))],
)
def test_plans_are_those_of_the_whole_model(model: str) -> None:
    ready = ready_of(make(model, "single", 1))
    found = {}
    for way, (net, planned, late) in ways(partial(build_model, ready.job, seed=1)).items():
        contract = LossContract(job=ready.job, model=net)
        example = ExampleBatch(
            job=ready.job, settings=ready.settings, plan=ready.plan, model=net, contract=contract, device=ALONE.device
        )
        example.learn_loss() if late is None else late.run_with_values(example.learn_loss)
        cut = told(partial(planned, partial(plan_stage_split, net, num_stages=2, call=example)))
        split = told(partial(planned, partial(choose_plan, net, ranks=2, run=example.run)))
        found[way] = (cut, split)
        if late is not None:
            assert all(parameter.is_meta for parameter in net.parameters())
    assert found["sketched"] == found["whole"]
    assert found["lent"] == found["whole"]


class Chain(nn.Module):
    """Three blocks of width 16, and something between them."""

    def __init__(self, between: Callable[["Chain", Tensor, int], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.bias = nn.Parameter(torch.ones(16))
        self.register_buffer("seen", torch.zeros(16), persistent=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.zeros(4, 16)
        x = self.first(x) + self.bias
        for number, block in enumerate(self.blocks):
            x = self.between(self, block(x), number)
        return x.sum()


def _plain(_: Chain, x: Tensor, __: int) -> Tensor:
    return x


def _kept(chain: Chain, x: Tensor, number: int) -> Tensor:
    """What the first block made goes around the second in memory that began as numbers."""
    if number == 0:
        chain.kept[:, :8].copy_(x[:, :8])
    return x + chain.kept if number == 2 else x


def _counted(chain: Chain, x: Tensor, _: int) -> Tensor:
    """A buffer is written over with what depends on weights, and read."""
    with torch.no_grad():
        chain.seen.mul_(0.5).add_(x.mean(0))
    return x * chain.seen.sign().abs().clamp(max=1)


def _asks(_: Chain, x: Tensor, number: int) -> Tensor:
    return -x if number == 0 and float(x.sum()) < 0 and float(x.sum()) > 0 else x


def _asks_last(_: Chain, x: Tensor, number: int) -> Tensor:
    return -x if number == 2 and float(x.sum()) < 0 and float(x.sum()) > 0 else x


def _cut(net: nn.Module, planned: Callable[[Callable[[], Any]], Any]) -> Any:
    x = torch.ones(4, 16)
    return told(partial(planned, partial(plan_stage_split, net, num_stages=3, call=lambda: {"loss": net(x)})))


@pytest.mark.parametrize(("between", "refused"), [(_plain, False), (_kept, True), (_counted, True)])
def test_the_same_cut_or_the_same_refusal(between: Callable[..., Tensor], refused: bool) -> None:
    found = {}
    for way, (net, planned, late) in ways(lambda: Chain(between)).items():
        found[way] = _cut(net, planned)
        assert late is None or not net.get_buffer("seen").any(), "the buffer is as it was"
    assert found["sketched"] == found["whole"] and found["lent"] == found["whole"], found
    assert isinstance(found["whole"], str) == refused


@pytest.mark.parametrize(("between", "refused"), [(_asks_last, False), (_asks, True)])
def test_a_number_that_is_asked_for_is_had(between: Callable[..., Tensor], refused: bool) -> None:
    every = ways(lambda: Chain(between))
    net, sketch, late = every["sketched"]
    assert late is not None
    with pytest.raises(UnknownNumber):
        _cut(net, sketch)
    whole = _cut(*every["whole"][:2])
    assert _cut(net, late.run_without_values) == whole and isinstance(whole, str) == refused
    assert refused or (
        "the forward asks for a number" in late.notes[0] and "test_plans_without_values.py:" in late.notes[0]
    )


def test_lent_values_are_those_that_the_model_will_have() -> None:
    class Shared(nn.Module):
        """Two parameters in one memory, and one that lies across."""

        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(2, 20, 20)
            self.one, self.other = nn.Parameter(both[0]), nn.Parameter(both[1])
            self.across = nn.Parameter(torch.randn(20, 20).t())

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = x @ self.one @ self.other @ self.across.t() + self.one[3].tolist()[2]
            return found

    late, x = late_of(Shared), torch.ones(3, 20)
    net = late.deferred_init.model
    lent = late.run_with_values(lambda: net(x))
    with late.temporary_values(net.parameters()):
        assert torch.equal(lent, net(x)) and lent.unique().numel() == 20
        assert named_tensors(net)["across"].stride() == (1, 20)
    assert all(parameter.is_meta for parameter in net.parameters())


def test_blocks_are_timed_one_after_another() -> None:
    late, x, most = late_of(lambda: Chain(_plain)), torch.ones(4, 16), []
    net = late.deferred_init.model

    class Runs:
        def __call__(self) -> Any:
            return self.run(net)

        def run(self, model: nn.Module) -> Any:
            return {"loss": model(x)}

    for block in net.blocks:
        block.register_forward_hook(lambda *_: most.append(sum(not p.is_meta for p in net.parameters())))
    seconds = make_block_timer(net, PlacementSettings(balance="measured"), ALONE, Runs(), late)
    assert seconds is not None
    found = seconds(dict(net.blocks.named_children()))
    assert len(found) == 3 and min(found) > 0
    assert set(most) == {len(list(Block(16).parameters())) + 3}, "a block's, and what stands around"
    assert all(parameter.is_meta for parameter in net.parameters()) and tensor_bytes(net) > 1000
