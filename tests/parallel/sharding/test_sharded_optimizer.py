"""The job's optimizer on shards: its groups, its state, and rules that are wrong on rows."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from paceline.errors import JobError, LayoutError
from paceline.parallel.module_access.parameters import NamedParameter, trainable_parameters
from paceline.parallel.sharding.optimizer_offload import offload_state
from paceline.parallel.sharding.row_shards import RowShard, make_row_shards, make_row_splits
from paceline.parallel.sharding.shardability_check import merge_equal_groups
from paceline.parallel.sharding.unit_guard import guard_sharded_forward
from paceline.parallel.sharding.zero_sharded_optimizer import ShardedOptimizerFactory, try_optimizer_factory
from paceline.torch_internals.private_api import JointScaler
from tests.matrix.matrix_page import patterns, stands


def shared_optimizers(
    factory: Callable[[Any], Any],
    named: Sequence[NamedParameter],
    shares: Sequence[RowShard],
    *,
    layout: str,
    exact: bool = False,
) -> list[Optimizer]:
    """Return the job's optimizers over shares that are cut by rows.

    Raises:
        JobError, LayoutError: the factory or an update rule does not support it.
    """
    rules = try_optimizer_factory(factory, named)
    rules.refuse_rows(layout=layout, exact=exact)
    return rules.make_optimizers(shares)


class Unplaced(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)


class Whole(nn.Module):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


class Sharded(FSDPModule, Unplaced):
    """As `fully_shard` makes it of a module's class."""


@pytest.mark.parametrize("way", ["shallow", "deep"])
def test_a_copy_of_a_module_of_which_a_rank_has_parts_is_refused(way: str) -> None:
    module = Unplaced(4)
    module.__class__ = Sharded
    with pytest.raises(LayoutError, match="the forward copies a module") as found, guard_sharded_forward():
        copy.copy(module) if way == "shallow" else copy.deepcopy(Whole())
    assert "call the module itself" in found.value.hint
    with pytest.raises(TypeError, match="missing 1 required"), guard_sharded_forward():
        Unplaced()  # type: ignore[call-arg]  # the user's own mistake is the user's own


class Sign(Optimizer):
    """A user's own, elementwise, with an attribute of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["last"] = 0.9 * state.get("last", torch.zeros_like(p)) + p.grad
                    p.sub_(group["lr"] * state["last"].sign())


class Trust(Sign):
    """Scales each update by its tensor's norm, as LAMB and LARS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


class Joint(Sign):
    """Scales all updates by what it sees in all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = sum(p.grad.square().sum() for p in every).sqrt()
        for p in every:
            p.sub_(p.grad / size)


class Late(Sign):
    """Looks at whole tensors from its fourth step on."""

    def moved(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        return grad / grad.norm() if self.state[p]["steps"] > 3 else grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.moved(p, p.grad))


class Clips(Late):
    def moved(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * (10 / grad.norm()).clamp(max=1.0)


class Spikes(Late):
    """Clips to twice the usual norm."""

    def moved(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        usual = self.state[p].setdefault("usual", grad.norm())
        return grad * (2 * usual.lerp_(grad.norm(), 0.1) / grad.norm()).clamp(max=1.0)


class Large(Late):
    def moved(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm() if min(p.shape) >= 128 else grad


class Skips(Late):
    """Leaves the momentum of a tensor without a gradient as it is."""

    def moved(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        last = self.state[p].setdefault("last", torch.zeros_like(p))
        return last.mul_(0.9).add_(grad) if grad.any() else last.mul(0)


class JointClips(Sign):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.sub_(p.grad * (1000 / size).clamp(max=1.0))


class Places(Sign):
    """A rate by the place in the list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for place, p in enumerate(p for group in self.param_groups for p in group["params"]):
            p.sub_(0.9**place * p.grad)


class Inner(Optimizer):
    """Leaves the work to another one; where `shares`, with the same groups."""

    def __init__(self, params: Any, *, shares: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        if shares:
            self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Copies(Sign):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]


class Noisy(Sign):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


class Keeper(Sign):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.mine = {p: 0 for group in self.param_groups for p in group["params"]}


def model() -> nn.Module:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    found.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    return found


def shares(place: int, places: int = 3, whole: Any = ()) -> tuple[nn.Module, list[RowShard]]:
    made = model()
    named = trainable_parameters(made)
    return made, make_row_shards(
        named, row_splits=make_row_splits(named, num_shards=places, full_tensor_names=whole), shard_rank=place
    )


def scheduled(named: Any) -> Optimizer:
    """A schedule wraps the step of the optimizer itself."""
    made = torch.optim.Muon([p for _, p in named if p.dim() == 2])
    torch.optim.lr_scheduler.StepLR(made, 3)
    return made


def closed(named: Any) -> Optimizer:
    class Closed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for _, p in named:
                if p.grad is not None:
                    p.sub_(p.grad)

    return Closed([p for _, p in named])


def hooked(named: Any, when: str) -> Optimizer:
    made = torch.optim.SGD([p for _, p in named], lr=0.1)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([p for _, p in named], 0.3)

    getattr(made, f"register_step_{when}_hook")(clip)
    return made


def patched(named: Any) -> Optimizer:
    made = torch.optim.SGD([p for _, p in named], lr=0.1)
    plain = made.step

    def step() -> None:
        plain()

    made.step = step  # type: ignore[method-assign]
    return made


LAYERS = list(model().parameters())
RIGHT = {
    "inside": lambda named: Inner([p for _, p in named], shares=True),
    "rates": lambda named: torch.optim.AdamW([{"params": [p], "lr": 0.1 / n} for n, (_, p) in enumerate(named, 1)]),
    "sgd": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda named: torch.optim.Adam([p for _, p in named], lr=0.1, amsgrad=True),
    "fused": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1, fused=True),
    "adagrad": lambda named: torch.optim.Adagrad(
        [{"params": [p for _, p in named], "lr": 0.3}], initial_accumulator_value=0.2, lr_decay=0.1
    ),
    "rmsprop": lambda named: torch.optim.RMSprop([p for _, p in named], lr=0.1, centered=True, momentum=0.5),
    "nadam": lambda named: torch.optim.NAdam([p for _, p in named], lr=0.1),
    "rprop": lambda named: torch.optim.Rprop([p for _, p in named], lr=0.1),
    "lion": lambda named: Sign([p for _, p in named]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_each_place_takes_its_rows_where_one_process_takes_them(name: str) -> None:
    whole = model()
    pairs = list(whole.named_parameters())
    right = RIGHT[name](pairs)
    ranks = [shares(place) for place in range(3)]
    optimizers = [
        shared_optimizers(RIGHT[name], trainable_parameters(made), own, layout="fsdp")[0] for made, own in ranks
    ]
    for step in range(4):
        torch.manual_seed(step)
        for p in whole.parameters():
            p.grad = torch.randn_like(p)
        for (_, own), optimizer in zip(ranks, optimizers, strict=True):
            gradients = {n: p.grad for n, p in pairs}
            for share in own:
                if share.shard_spec.local_shape is not None:
                    share.parameter.grad = share.shard_spec.extract(gradients[share.name])
            optimizer.step()
        right.step()
    for (made, own), optimizer in zip(ranks, optimizers, strict=True):
        assert len(optimizer.param_groups) == len(right.param_groups)
        for group, other in zip(optimizer.param_groups, right.param_groups, strict=True):
            assert {k: v for k, v in group.items() if k != "params"} == {
                k: v for k, v in other.items() if k != "params"
            }
        for share in own:
            if share.shard_spec.local_shape is not None:
                expected = share.shard_spec.extract(dict(pairs)[share.name].detach())
                assert torch.allclose(share.parameter.detach(), expected, rtol=1e-6, atol=1e-7), share.name
                assert share.parameter.untyped_storage()._cdata == share.model_parameter.untyped_storage()._cdata
        del made


def test_named_groups_stay_also_where_one_is_empty_here() -> None:
    made, own = shares(2)
    named = trainable_parameters(made)

    def factory(pairs: Any) -> Optimizer:
        bias = [(n, p) for n, p in pairs if n.endswith("bias")]
        rest = [(n, p) for n, p in pairs if not n.endswith("bias")]
        return torch.optim.AdamW([{"params": rest, "lr": 0.1}, {"params": bias, "weight_decay": 0.0}], lr=0.2)

    here = [share for share in own if not share.name.endswith("bias")]  # a stage that has no bias
    (optimizer,) = try_optimizer_factory(factory, named).make_optimizers(here)
    assert [group["param_names"] for group in optimizer.param_groups] == [[s.name for s in here], []]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    for share in here:
        share.parameter.grad = torch.ones_like(share.parameter)
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda named: torch.optim.Muon([p for _, p in named if p.dim() == 2]), "Muon gives different values"),
        (lambda named: torch.optim.Adafactor([p for _, p in named]), "Adafactor gives different values"),
        (lambda named: Trust([p for _, p in named]), "Trust gives different values"),
        (lambda named: Trust([p for _, p in named], lr=0.0), "Trust gives different values"),
        (lambda named: Late([p for _, p in named]), "Late gives different values"),
        (lambda named: Clips([p for _, p in named]), "Clips gives different values"),
        (lambda named: Spikes([p for _, p in named]), "Spikes gives different values"),
        (lambda named: Large([p for _, p in named]), "Large gives different values"),
        (lambda named: Skips([p for _, p in named]), "Skips gives different values"),
        (lambda named: scheduled(named), "Muon gives different values"),
    ],
)
def test_a_rule_on_whole_tensors_is_refused_by_name_or_given_whole_ones(make: Any, says: str) -> None:
    rules = try_optimizer_factory(make, trainable_parameters(model()))
    with pytest.raises(LayoutError, match=says) as raised:
        rules.refuse_rows(layout="fsdp")
    assert stands(str(raised.value).splitlines()[0], patterns()), "docs/refusals.md does not have it"
    whole = rules.full_tensor_reasons()
    assert "0.weight" in whole
    cut = make_row_splits(trainable_parameters(model()), num_shards=2, full_tensor_names=list(whole))
    owned = [sum(cut[name].numel(place) for name in whole) for place in range(2)]
    assert all(owned) and sum(owned) == sum(p.numel() for n, p in model().named_parameters() if n in whole)
    for name in whole:
        assert sorted(cut[name].numel(place) > 0 for place in range(2)) == [False, True]


def test_fused_rows_are_refused_in_exact_mode_only() -> None:
    rules = try_optimizer_factory(RIGHT["fused"], trainable_parameters(model()))
    rules.refuse_rows(layout="fsdp")
    if not rules.full_tensor_reasons(exact=True):
        pytest.skip("this processor's fused kernel rounds alike in body and tail")
    with pytest.raises(LayoutError, match="AdamW gives different bits"):
        rules.refuse_rows(layout="fsdp", exact=True)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda named: Joint([p for _, p in named]), "Joint updates a parameter differently if it also updates"),
        (lambda named: Noisy([p for _, p in named]), "Noisy updates a parameter differently if it also updates"),
        (
            lambda named: JointClips([p for _, p in named]),
            "JointClips updates a parameter differently if it also updates",
        ),
        (lambda named: Places([p for _, p in named]), "Places updates a parameter differently if it also updates"),
        (lambda named: Inner([p for _, p in named], shares=False), "Inner does not update the parameters in its param"),
        (lambda named: closed(named), "Closed does not update the parameters in its param"),
        (lambda named: hooked(named, "pre"), r"optimizer= hooked hooked.<locals>.clip into the step of SGD"),
        (lambda named: hooked(named, "post"), r"optimizer= hooked hooked.<locals>.clip into the step of SGD"),
        (lambda named: patched(named), r"optimizer= hooked patched.<locals>.step into the step of SGD"),
        (lambda named: torch.optim.SGD([p for _, p in named if p.norm().item() > 0]), "parameters without memory"),
    ],
)
def test_what_no_cut_gets_right_is_refused(make: Any, says: str) -> None:
    with pytest.raises(JobError, match=says) as raised:
        try_optimizer_factory(make, trainable_parameters(model())).full_tensor_reasons()
    told = str(raised.value).splitlines()[0]
    assert "without memory" in told or stands(told, patterns()), "docs/refusals.md does not have it"


def test_an_optimizer_with_its_own_references_is_refused() -> None:
    made, own = shares(0)
    with pytest.raises(JobError, match=r"Keeper\.mine holds parameters"):
        try_optimizer_factory(lambda named: Keeper([p for _, p in named]), trainable_parameters(made)).make_optimizers(
            own
        )
    with pytest.raises(JobError, match=r"Copies\.slow holds parameters"):
        try_optimizer_factory(lambda named: Copies([p for _, p in named]), trainable_parameters(made)).make_optimizers(
            own
        )


def test_groups_that_differ_in_their_rate_alone_are_tried_once() -> None:
    groups = [{"params": [p], "lr": 0.1 / n, "weight_decay": 0.1 * (p.dim() > 1)} for n, p in enumerate(LAYERS, 1)]
    assert [len(group["params"]) for group in merge_equal_groups(torch.optim.AdamW(groups))] == [5, 2]


def test_a_rule_on_whole_vectors_is_refused_on_pieces_of_one() -> None:
    rules = try_optimizer_factory(lambda named: Trust([p for _, p in named]), trainable_parameters(nn.LayerNorm(6)))
    with pytest.raises(LayoutError, match="Trust needs whole vectors, and tp leaves pieces of weight"):
        rules.refuse_slices({"weight"}, layout="tp")
    rules.refuse_slices(set(), layout="tp")


def test_exact_mode_refuses_rules_whose_bits_differ_on_pieces() -> None:
    def rules(fused: bool) -> ShardedOptimizerFactory:
        model = nn.Linear(6, 6)
        return try_optimizer_factory(
            lambda named: torch.optim.AdamW([p for _, p in named], fused=fused), trainable_parameters(model)
        )

    rules(False).refuse_slices({"weight"}, layout="tp", exact=True)
    rules(True).refuse_slices({"weight"}, layout="tp")
    with pytest.raises(LayoutError, match="AdamW needs whole matrices"):
        rules(True).refuse_slices({"weight"}, layout="tp", exact=True)


def test_a_probe_leaves_the_optimizer_and_the_random_stream_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rules = try_optimizer_factory(lambda named: Sign([p for _, p in named]), trainable_parameters(model()))
    torch.set_rng_state(before)
    rules.full_tensor_reasons()
    assert torch.equal(torch.get_rng_state(), before)
    assert not rules.optimizers[0].state and rules.optimizers[0].seen == []  # type: ignore[attr-defined]


def test_offloaded_state_is_at_home_between_steps() -> None:
    made, own = shares(0)
    (optimizer,) = shared_optimizers(RIGHT["adam"], trainable_parameters(made), own, layout="zero1")
    plain = shared_optimizers(RIGHT["adam"], trainable_parameters(model()), shares(0)[1], layout="zero1")[0]
    offload_state(optimizer)
    for _ in range(2):
        for one in (optimizer, plain):
            for group in one.param_groups:
                for p in group["params"]:
                    p.grad = torch.ones_like(p)
            one.step()
    for one, other in zip(optimizer.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        assert all(v.device.type == "cpu" for v in optimizer.state[one].values())


def test_one_rank_s_overflow_is_everybody_s() -> None:
    """The other rank has no gradient at all, and skips the step with the first."""
    world: list[float] = []

    def join(tensor: torch.Tensor) -> None:
        world.append(float(tensor))
        tensor.fill_(max(world))

    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    weights[0].grad = torch.tensor([1.0, float("inf"), 1.0])
    scales = []
    for weight in weights:
        scaler = JointScaler("cpu", all_reduce_max=join, init_scale=4.0)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(torch.ones(1))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(weight.detach(), torch.ones(3))
    assert scales == [2.0, 2.0] and world == [1.0, 0.0]
