"""Exact mode sums a tied weight use by use, as pipeline stages do; shared parts of FSDP units equal one process."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.sharding.unit_gradient_order import keep_gradient_order


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight.data.copy_(self.embed.weight.data)
        if tied:
            self.head.weight = self.embed.weight
        self.reads = reads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).tanh()
        found: Tensor = self.head(x)
        return found + F.linear(x, self.embed.weight) if self.reads else found


MICRO = [torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(n)) for n in range(5)]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten(), reduction="sum")


def summed(model: nn.Module, uses: TiedUses) -> Tensor:
    """The gradient of the embedding, of all microbatches."""
    named = trainable_parameters(model)
    grid = FixedPointGrid(names=[member.name for member in named], tied_uses=uses)
    reducer = ExactReducer(named_parameters=named, world=World(device=torch.device("cpu")), grid=grid)
    for _ in range(2):
        reducer.begin()
        for place, ids in enumerate(MICRO):
            reducer.before_backward(last=place == len(MICRO) - 1)
            loss(model, ids).backward()
            reducer.after_backward()
        if reducer.finish(divisor=None):
            break
    found = named[0].parameter.grad
    reducer.close()
    assert found is not None
    return found


def test_each_use_is_a_summand() -> None:
    apart = Tied(tied=False)
    each: list[Tensor] = []
    for ids in MICRO:
        apart.zero_grad()
        loss(apart, ids).backward()
        each += [p.grad.double() for p in apart.parameters() if p.grad is not None]
    wanted = torch.stack(each).sum(0).float()
    model = Tied()
    uses = TiedUses(model)
    assert uses.names == {"embed.weight"} and not TiedUses(apart).names
    together = summed(model, uses)
    uses.register_hooks()
    assert torch.equal(summed(model, uses), wanted)
    assert not torch.equal(together, wanted), "autograd's own sum has the same bits: this shows nothing"
    assert model.head.weight is model.embed.weight and not vars(model.head).get("weight"), (
        "it was shown, and is not now"
    )


def test_a_read_beside_the_modules_that_hold_it_is_one_more() -> None:
    model = Tied(reads=True)
    uses = TiedUses(model)
    uses.register_hooks()
    exact = summed(model, uses)
    plain = Tied(reads=True)
    for ids in MICRO:
        loss(plain, ids).backward()
    assert plain.embed.weight.grad is not None and torch.allclose(exact, plain.embed.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_read_by_name_of_what_crosses_stages_is_refused() -> None:
    model = Tied(reads=True)
    uses = TiedUses(model)
    uses.register_hooks()
    uses.multi_stage_names = uses.names
    with pytest.raises(
        LayoutError, match=r"embed.weight is read on several stages, and by a module that does not hold"
    ):
        summed(model, uses)


def test_without_gradients_nothing_is_shown() -> None:
    model = Tied()
    uses = TiedUses(model)
    uses.register_hooks()
    seen: list[Any] = []
    model.head.register_forward_pre_hook(lambda module, _: seen.append(vars(module).get("weight")))
    with torch.no_grad():
        model(MICRO[0])
    model(MICRO[0])
    assert seen[0] is None and seen[1] is not None
    uses.close()
    assert not model.embed._forward_pre_hooks


class Reads(nn.Module):
    """A unit that reads a value which others read too, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(64)) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return (x + memory * self.a) * (memory * self.b).cos()


class Identity(torch.autograd.Function):
    """As `fully_shard` puts it in front of a unit."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Any:
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


def through(_: nn.Module, args: Any) -> Any:
    grads = [a for a in args if a.requires_grad]
    found = iter(Identity.apply(*grads))
    return tuple(next(found) if a.requires_grad else a for a in args)


def memory_grad(*, hooked: bool, alone: bool) -> Tensor:
    torch.manual_seed(0)
    units, memory = [Reads() for _ in range(4)], torch.randn(64, requires_grad=True)
    x = torch.randn(64, requires_grad=True) * 1.0
    for unit in units if hooked else ():
        with keep_gradient_order(unit) if alone else nullcontext():
            unit.register_forward_pre_hook(through, prepend=True)
    for unit in units:
        x = unit(x, memory)
    x.sum().backward()
    assert memory.grad is not None
    return memory.grad


def test_a_unit_s_identity_leaves_the_order_of_sums_alone() -> None:
    wanted = memory_grad(hooked=False, alone=False)
    assert torch.equal(memory_grad(hooked=True, alone=True), wanted)
    unit_by_unit = memory_grad(hooked=True, alone=False)
    assert torch.allclose(unit_by_unit, wanted, rtol=1e-3) and not torch.equal(unit_by_unit, wanted)
