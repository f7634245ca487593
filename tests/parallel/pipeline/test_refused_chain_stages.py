"""What stages cannot do as one process does is refused: draws, counters, orders, reads between blocks."""

import copy
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import LayoutError
from paceline.parallel.module_access.blocks import NoChain
from paceline.parallel.pipeline.chain.split import StageSplit, plan_stage_split
from paceline.parallel.pipeline.chain.stages import Stages
from paceline.parallel.pipeline.graph.cut_points import plan_graph
from paceline.parallel.pipeline.stagewise_check import compare_stagewise
from paceline.step.pipeline.split_backward import backward_input
from tests.parallel.pipeline.stages_in_one_process import Ranks, alone


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(torch.tanh(self.a(x)))
        return found


class _Odd(nn.Module):
    """Four blocks, and what a `way` says in one of them or between them."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.count, self.after = way, 0, 0
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.gains = nn.ParameterList(torch.full((4,), 1.0 + i) for i in range(4))
        for block in self.blocks:
            block.register_forward_hook(self._beside)

    def _beside(self, block: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.way == "random" and block is self.blocks[3]:
            return output * random.random()
        return output * float(np.random.rand()) if self.way == "numpy" and block is self.blocks[1] else output

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        order = list(zip(self.blocks, self.gains, strict=True))
        if self.way == "shuffled" and torch.is_grad_enabled():
            order = [order[2], order[1], order[0], order[3]]
        if self.way == "skipped" and torch.is_grad_enabled():
            order = order[:3]
        given = x = x.requires_grad_(self.way == "penalty")
        for block, gain in order:
            x = torch.func.vmap(block)(x) if self.way == "vmap" else block(x)
            x = x * gain * block.b.bias.mean()
        if self.way == "counts late":
            self.after += 1
        if self.way == "penalty" and torch.is_grad_enabled():
            x = x + torch.autograd.grad(x.sum(), given, create_graph=True)[0]
        return x * (1 + 0.1 * self.count)


def _odd_loss(model: nn.Module, microbatch: int) -> Tensor:
    return model(torch.ones(3, 4) * (microbatch + 1)).square().sum()


def _odd(way: str = "") -> tuple[_Odd, StageSplit]:
    torch.manual_seed(0)
    model = _Odd(way)
    return model, plan_stage_split(model, num_stages=2, call=lambda: _odd_loss(model, 0))


def test_parameters_read_between_blocks_and_a_counter_are_as_in_one_process() -> None:
    model, cut = _odd()
    assert model.count == 0 and cut.counter_attribute == "count"
    losses, right, _ = alone(model, loss=_odd_loss, num_micro=2)
    staged = Ranks(
        model, cut=cut, loss=_odd_loss, staged=lambda each, index: Stages(each, split=cut, owned_stages=[index])
    )
    for microbatch in range(2):
        assert torch.equal(staged.train(microbatch), losses[microbatch])
    found = staged.gradients()
    assert found.keys() == right.keys()
    assert all(torch.allclose(found[name], right[name], rtol=1e-6) for name in right)


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("random", "the block blocks.3 draws from random, "),
        ("numpy", "the block blocks.1 draws from numpy.random, "),
        ("counts late", "the forward changes self.after after its first block"),
        ("vmap", "inside a torch.func"),
    ],
)
def test_what_a_stage_would_do_otherwise_than_one_process_is_refused(way: str, says: str) -> None:
    with pytest.raises(LayoutError) as refused:
        _odd(way)
    assert says in refused.value.what and refused.value.hint


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("shuffled", "does not call its blocks in the order in which the model was cut: blocks.0 was expected"),
        ("skipped", "does not call its blocks in the order in which the model was cut: blocks.3 was expected"),
        ("penalty", "asks for the gradient of a value that is on another stage"),
    ],
)
def test_a_step_that_goes_another_way_than_the_cut_is_refused(way: str, says: str) -> None:
    model, cut = _odd(way)
    staged = Ranks(
        model, cut=cut, loss=_odd_loss, staged=lambda each, index: Stages(each, split=cut, owned_stages=[index])
    )
    with pytest.raises(LayoutError) as refused:
        staged.train(0)
    assert says in refused.value.what and refused.value.hint


def test_batches_of_one_row_have_shapes_without_the_weights_of_batchnorm() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(4), "blocks": nn.ModuleList(_Block() for _ in range(2))})

    def loss(each: Any, microbatch: int) -> Tensor:
        x = each["norm"](torch.ones(1 if microbatch else 3, 4))
        return each["blocks"][1](each["blocks"][0](x)).sum()

    cut = plan_stage_split(model, num_stages=2, call=lambda: loss(model, 0))
    whole, last = copy.deepcopy(model).eval(), copy.deepcopy(model)
    first = Stages(model, split=cut, owned_stages=[0])
    second = Stages(last, split=cut, owned_stages=[1])
    sent = first.run(0, None, lambda: loss(model.eval(), 1))
    assert torch.equal(second.run(1, sent.as_stage_input(), lambda: loss(last.eval(), 1)), loss(whole, 1))
    last.train()
    second.run(1, sent.as_stage_input(), lambda: loss(last, 1))


def test_a_reentrant_checkpoint_in_halves_is_refused() -> None:
    block, x = _Block(), torch.ones(2, 4, requires_grad=True)
    y = block(checkpoint(block, x, use_reentrant=True))
    with pytest.raises(LayoutError, match="use_reentrant=True, whose backward can't be split in halves"):
        backward_input([y], [torch.ones_like(y)], [x])


class _Appending(nn.Module):
    """Blocks that leave their values in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Leaving() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        beside: list[Tensor] = []
        for block in self.blocks:
            x = block(x, beside)
        return x * (1 + sum(beside))


class _Leaving(_Block):
    def forward(self, x: Tensor, beside: list[Tensor]) -> Tensor:  # type: ignore[override]
        beside.append(x.mean())
        return super().forward(x)


def test_a_list_that_blocks_append_to_is_refused() -> None:
    model = _Appending()
    with pytest.raises(LayoutError, match=r"blocks\.0 changes a list or a dict that it gets"):
        plan_graph(model, num_stages=2, call=lambda: _odd_loss(model, 0))


class _Decides(nn.Module):
    """A branch on a value that is drawn before the list of blocks, or made by its first one."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.drawn = drawn
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(_Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(nn.functional.dropout(x, 0.5) if self.drawn else x)
        if self.drawn:
            x = self.blocks(x * 2 if x.sum() > 1e6 else x)
        else:
            kept = self.blocks[0](x)
            x = self.blocks[2](self.blocks[1](kept))
            x = self.blocks[3](x * 2 if kept.sum() > 1e6 else x)
        found: Tensor = self.last(x)
        return found


@pytest.mark.parametrize(
    ("drawn", "bounds", "hint"),
    [
        (True, [2, 2], "--place.blocks first,blocks,last --place.stages 1,2; or move it into a block"),
        (False, [2, 2], "--place.stages 1,3; or move it into a block"),
    ],
)
def test_a_branch_on_another_stage_says_a_cut_that_works(drawn: bool, bounds: list[int], hint: str) -> None:
    torch.manual_seed(0)
    model = _Decides(drawn)
    with pytest.raises(LayoutError, match="the forward branches on a value that stage") as refused:
        plan_stage_split(model, num_stages=2, call=lambda: _odd_loss(model, 0), bounds=bounds)
    assert refused.value.hint == hint


class _Raised(nn.Module):
    """Dropout that is off at first, in blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(_Block(), nn.Dropout(0.0)) for _ in range(4))
        self.between = nn.Dropout(0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


def test_dropout_that_is_raised_after_planning_draws_as_in_one_process() -> None:
    def loss(model: Any, microbatch: int) -> Tensor:
        for block in model.blocks if microbatch else ():
            block[1].p = model.between.p = 0.3
        return _odd_loss(model, microbatch)

    torch.manual_seed(0)
    model = _Raised()
    cut = plan_stage_split(model, num_stages=2, call=lambda: loss(model, 0))
    assert not cut.stages[1].has_rng_state_input
    losses, right, _ = alone(model, loss=loss, num_micro=2)
    staged = Ranks(model, cut=cut, loss=loss, staged=lambda each, index: Stages(each, split=cut, owned_stages=[index]))
    assert [len(sent.tensors) for sent in staged.forward(0)[0][:1]] == [1], "nothing crosses for rates that are off"
    assert all(torch.equal(staged.train(microbatch), loss) for microbatch, loss in enumerate(losses))
    assert all(torch.equal(found, right[name]) for name, found in staged.gradients().items())


@pytest.mark.parametrize(("inside", "between"), [(0.3, 0.0), (0.3, 0.3), (0.0, 0.3)])
def test_stages_whose_blocks_draw_have_the_result_of_the_whole_model(inside: float, between: float) -> None:
    torch.manual_seed(0)
    model = _Raised()
    model.between.p = between
    for block in model.blocks:
        block[1].p = inside

    def call() -> Tensor:
        model.train()
        return _odd_loss(model, 0)

    compare_stagewise(model, split=plan_stage_split(model, num_stages=2, call=call), call=call)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


class _ByPython(nn.Module):
    """A block that draws from Python's generator in evaluation mode, which no stage can repeat."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * (1.0 + random.random())


def test_blocks_that_draw_from_python_s_generator_are_refused() -> None:
    torch.manual_seed(0)
    model = _Raised()
    for block in model.blocks:
        block[1] = _ByPython()
    with pytest.raises(NoChain):
        compare_stagewise(model, split=_cut_of(model), call=lambda: _odd_loss(model, 0))


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)))
    return found


def test_scripted_blocks_are_run_stage_by_stage() -> None:
    torch.manual_seed(0)
    model = _Raised()
    model.blocks = nn.ModuleList(_scripted() for _ in range(4))
    compare_stagewise(model, split=_cut_of(model), call=lambda: _odd_loss(model, 0))


def _cut_of(model: nn.Module) -> StageSplit:
    return plan_stage_split(model, num_stages=2, call=lambda: _odd_loss(model, 0))
