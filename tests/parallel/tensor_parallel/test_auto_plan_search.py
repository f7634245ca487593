"""The search for a tensor plan converges for any depth, agrees with verify and leaves no trace."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.parallel.tensor_parallel.auto_plan import derive_plan
from paceline.parallel.tensor_parallel.collectives import WorldGroup
from paceline.parallel.tensor_parallel.tensor_parallel import split_model_in_group
from paceline.parallel.tensor_parallel.tensor_plan import ParameterRole, TensorPlan
from paceline.verification.reference.float64_mode import keep_float64
from tests.parallel.tensor_parallel.tensor_parallel_models import run_group


class Block(nn.Module):
    """Fused attention and a fused gate between norms written by hand, through which a cut travels on."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.lift, self.sink = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (p.view(b, t, 4, -1).transpose(1, 2) for p in self.qkv(_norm(x)).chunk(3, -1))
        shares = F.softmax(q @ k.transpose(-1, -2), dim=-1, dtype=torch.float32).type_as(v)
        x = x + self.out((shares @ v).transpose(1, 2).reshape(b, t, c))
        up, gate = self.lift(_norm(x)).chunk(2, -1)
        return x + self.sink(up * F.silu(gate.float()).type_as(up))


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Odd(Block):
    """Its first product has the shape of the others' fused one, and is four heads of twelve."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.out = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.qkv(_norm(x)).unflatten(-1, (4, 12)).relu().flatten(-2))


def _roles(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, tuple[str, int]]:
    model, x = model.to(dtype), torch.randn(2, 4, 16, dtype=dtype)
    plan = derive_plan(model, run=lambda m: m(x).sum(), ranks=2)
    return {name: (role.kind, role.fused) for name, role in plan.roles.items()}


def test_many_blocks_of_fused_projections_settle_in_few_runs() -> None:
    runs = []
    model = nn.Sequential(*(Block() for _ in range(8)))
    model.register_forward_hook(lambda *_: runs.append(1))
    wanted = {"*.qkv": ("column", 3), "*.out": ("row", 1), "*.lift": ("column", 2), "*.sink": ("row", 1)}
    assert _roles(model) == wanted
    assert len(runs) <= 5


def test_a_block_unlike_the_others_has_its_own_plan() -> None:
    found = _roles(nn.Sequential(Block(), Odd(), Block()))
    assert [found[f"{n}.qkv"] for n in range(3)] == [("column", 3), ("column", 1), ("column", 3)]
    assert found["*.out"] == ("row", 1)


@pytest.mark.parametrize("blocks", [1, 3])
def test_verify_in_float64_finds_the_plan_of_training(blocks: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    plain = _roles(model)
    with keep_float64():
        assert _roles(model, torch.float64) == plain


class Tracking(nn.Module):
    """Whatever a forward may keep: a buffer, a counter, a list, a weight set from the first batch, numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.scale = nn.BatchNorm1d(16), nn.Parameter(torch.ones(16))
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes, self.is_new = 0, list[int](), True

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        self.sizes.append(len(x))
        if self.is_new:
            self.scale.data.copy_(x.std(0) + random.random())
            self.is_new = False
        x = self.norm(x) * self.scale + torch.rand(16) * self.calls
        return self.second(self.first(x).relu())


def test_the_search_leaves_no_trace_in_the_model() -> None:
    model, x = Tracking(), torch.randn(4, 16)
    before, drawn = copy.deepcopy(model), (random.getstate(), torch.get_rng_state())
    assert set(derive_plan(model, run=lambda m: m(x).sum(), ranks=2).roles) == {"first", "second"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.state_dict().items())
    assert (model.calls, model.sizes, model.is_new) == (0, [], True)
    assert random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])


class Pair(nn.Module):
    """Two products twice; the second pair is used as `how` does."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.how, self.beside = how, nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(lambda one: self.second(self.first(one).tanh()), self.beside(x))


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "vmap": lambda work, x: torch.func.vmap(work)(x),
    "jacrev": lambda work, x: torch.func.jacrev(lambda y: work(y).sum(0))(x).sum((0, 1)),
    "grad": lambda work, x: torch.func.grad(lambda y: work(y).sum())(x),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_what_torch_func_reads_stays_whole(kind: str) -> None:
    model, x = Pair(TRANSFORMS[kind]), torch.randn(4, 16)
    plan = derive_plan(model, run=lambda m: m(x).sum(), ranks=2)
    assert set(plan.roles) == {"beside.0", "beside.2"}


def _said(how: Callable[..., Tensor]) -> LayoutError:
    model, x = Pair(how), torch.randn(4, 16)
    plan = TensorPlan(roles={"first": ParameterRole(kind="column"), "second": ParameterRole(kind="row")}, source="file")

    def run(wire: WorldGroup) -> None:
        mine = copy.deepcopy(model)
        split_model_in_group(mine, plan=plan, group=wire)
        mine(x).sum().backward()

    with pytest.raises(LayoutError) as caught:
        run_group(run, ranks=2)
    return caught.value


def _penalty(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(work(x).sum(), x, create_graph=True)
    return slope.square().sum()


def test_a_gradient_of_a_gradient_is_refused_with_its_line() -> None:
    said = _said(_penalty)
    assert said.what.startswith("a second-order gradient goes through operations that are split")
    assert "test_auto_plan_search.py:" in said.where and said.hint


def test_torch_func_on_what_a_plan_of_the_user_cuts_is_refused() -> None:
    said = _said(TRANSFORMS["vmap"])
    assert "is called inside torch.func" in said.what and "first.weight" in said.what and said.hint
