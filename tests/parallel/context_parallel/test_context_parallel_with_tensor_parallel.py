"""Combinations inside a layer: a ring for each tensor-parallel rank's heads, sequence shards in FSDP units.

The ranks are threads of one process, in float64; `tests/matrix` does the same in processes, as soak.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import ThreadWorld, run_threads, thread_worlds
from paceline.errors import LayoutError
from paceline.parallel.context_parallel import function_mode as context_mode
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.context_parallel.function_mode import ContextParallelMode
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding
from paceline.parallel.tensor_parallel.auto_plan import derive_plan
from paceline.parallel.tensor_parallel.collectives import WorldGroup
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.parallel.tensor_parallel.sharding import shard_evenly
from paceline.parallel.tensor_parallel.tensor_parallel import split_model_in_group
from paceline.parallel.tensor_parallel.user_hook_local_shards import expose_local_shards

CP = TP = 2
SEQUENCE = {"0": 1, "1": 1}


class Net(nn.Module):
    """Four heads of queries, two of keys; positions are a slice of a parameter."""

    def __init__(self, *, groups: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(64, 32), nn.Parameter(torch.randn(1, 24, 32))
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32 // groups), nn.Linear(32, 32 // groups)
        self.out, self.norm, self.head = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 64)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.groups = groups

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[:, : ids.shape[1]]
        q, k, v = (of(x).unflatten(-1, (-1, 8)).transpose(1, 2) for of in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        found: Tensor = self.head(self.norm(x + self.down(F.gelu(self.up(x)))))
        return found


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def grid(work: Callable[[World, WorldGroup], Any], *, sequence: bool = False) -> dict[tuple[int, int], Any]:
    """`work` on every rank of cp × tp, each a thread with an end of its ring and one of its tensor group."""
    rings = [thread_worlds(replicas=CP) for _ in range(TP)]
    groups = [thread_worlds(replicas=TP) for _ in range(CP)]

    def run(rank: int) -> Any:
        c, t = divmod(rank, TP)
        return work(rings[t][c], WorldGroup(groups[c][t], sequence=sequence))

    def leave() -> None:
        for world in (each[0] for each in (*rings, *groups)):
            assert isinstance(world, ThreadWorld)
            world.rendezvous.end()

    found = run_threads(run, ranks=CP * TP, end_waiting=leave)
    return {divmod(rank, TP): found[rank] for rank in range(CP * TP)}


def far(*, sequence: bool = False, groups: int = 2) -> float:
    """The largest difference of a gradient on cp × tp from one process's, and of the loss."""
    torch.manual_seed(0)
    model = Net(groups=groups).double()
    window = torch.randint(0, 64, (2, 20))
    batch = (window[:, :-1], window[:, 1:])
    plan = derive_plan(Net(groups=2).double(), run=lambda one: summed(one(batch[0]), batch[1]), ranks=TP)
    plan = plan.with_replicated(["k", "v"] if model.groups == 4 else [])
    loss = summed(model(batch[0]), batch[1])
    loss.backward()

    def work(over: World, wire: WorldGroup) -> Any:
        mine = copy.deepcopy(model)
        mine.zero_grad()
        placed = split_model_in_group(mine, plan=plan, group=wire)
        context = ContextParallel(model=mine, sequence=SEQUENCE, world=over)
        part = context.shard(batch)
        with context.forward(part):
            total = summed(mine(part.data[0]), part.data[1])
        total.backward()
        grads = {n: over.all_reduce(p.grad.clone()) for n, p in mine.named_parameters() if p.grad is not None}
        return over.all_reduce(total.detach().clone()), grads, placed.shard_specs

    found = grid(work, sequence=sequence)
    apart = [float((total - loss.detach()).abs() / loss.detach()) for total, _, _ in found.values()]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for c in range(CP):
            whole = torch.full_like(parameter, torch.nan)
            for t in range(TP):
                found[c, t][2][name].write_into(found[c, t][1][name], full_tensor=whole)
            difference = (whole - parameter.grad).abs().max() / parameter.grad.abs().max()
            apart.append(float(difference.nan_to_num(nan=1.0)) if name != "k.bias" else 0.0)  # a key's bias has none
    return max(apart)


@pytest.mark.parametrize(("groups", "sequence"), [(2, False), (2, True), (4, False)])
def test_each_tensor_rank_s_heads_go_round_their_own_ring(
    groups: int, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where two ranks can't share the one head of keys it stays whole, and each takes what its queries read."""
    heads = []
    honest = context_mode.ring_attention

    def ring(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        heads.append((query.shape[1] * query.shape[2], key.shape[1]))
        return honest(query, key, value, **how)

    monkeypatch.setattr(context_mode, "ring_attention", ring)
    assert far(groups=groups, sequence=sequence) < 1e-12
    keys = 4 // groups // TP or 4 // TP
    assert heads == [(4 // TP, keys)] * (CP * TP)


def test_a_ring_over_the_heads_of_another_rank_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ContextParallelMode._ring_attention

    def wrong(self: ContextParallelMode, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        return honest(self, query, key if how["sharded_query"] is None else key.roll(1, -3), value, **how)

    monkeypatch.setattr(ContextParallelMode, "_ring_attention", wrong)
    assert far(groups=1) > 1e-3


def test_attention_that_drops_draws_what_one_process_draws() -> None:
    """For all heads and the whole sequence, of which each rank keeps its own rows of its own heads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 11, 8) for _ in range(3))
    torch.manual_seed(7)
    wanted, following = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True), torch.rand(1)
    cut, heads = SequenceSharding(length=11, ranks=CP), shard_evenly(4, ranks=TP, dim=1)
    drawn = []
    for c in range(CP):
        for t in range(TP):
            wire = WorldGroup(thread_worlds(replicas=TP)[t])
            mode = ContextParallelMode(world=thread_worlds(replicas=CP)[c], sharding=cut, model=nn.Identity())
            query = cut.shard(q, dim=2, rank=c).narrow(1, 2 * t, 2)
            torch.manual_seed(7)
            drawn.append(mode._draw_dropout_mask(query, 0.3, ShardPropagatingTensor.from_local(query, heads, wire)))
            assert torch.rand(1) == following
    kept = torch.cat([cut.join(drawn[t::TP], dim=2) for t in range(TP)], 1)
    shares = (q @ k.mT / 8**0.5).masked_fill(~torch.ones(11, 11).tril().bool(), -torch.inf).softmax(-1)
    assert torch.allclose((shares * kept / 0.7) @ v, wanted, atol=1e-6)


def test_a_table_that_fully_shard_gathers_gives_the_part_s_rows() -> None:
    """The parameter that stands there while a unit runs is another than the one that the model was placed with."""
    table, cut = nn.Parameter(torch.arange(9.0)[:, None]), SequenceSharding(length=9, ranks=CP)
    for rank in range(CP):
        over = thread_worlds(replicas=CP)[rank]
        with ContextParallelMode(world=over, sharding=cut, model=nn.Identity()):
            rows = table[: cut.local_length(rank)]
        assert rows[:, 0].tolist() == cut.positions(rank).tolist()


class Seen(torch.autograd.Function):
    """What `fully_shard` puts before a unit: an identity that hears when the gradient has passed."""

    @staticmethod
    def forward(ctx: Any, told: list[str], x: Tensor) -> Tensor:
        ctx.told = told
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.told.append("input")
        return None, *grads


@pytest.mark.parametrize("shown", [True, False])
def test_hooks_that_know_no_cut_see_the_piece(shown: bool) -> None:
    wire = WorldGroup(thread_worlds(replicas=TP)[1], sequence=True)
    local, cut = torch.randn(2, 3, 4, requires_grad=True), shard_evenly(6, ranks=TP, dim=1)
    unit, told = nn.GELU(), list[str]()

    def after(_: Any, __: Any, output: Tensor) -> None:
        assert type(output) is Tensor
        output.register_hook(lambda grad: told.append("output"))

    with expose_local_shards(unit) if shown else nullcontext():
        unit.register_forward_hook(after)
        unit.register_forward_pre_hook(lambda _, args: (Seen.apply(told, args[0]), *args[1:]), prepend=True)
    if not shown:
        with pytest.raises(LayoutError, match="Seen is a custom autograd function"):
            unit(ShardPropagatingTensor.from_local(local, cut, wire))
        return
    found = unit(ShardPropagatingTensor.from_local(local, cut, wire, origins=["w"]))
    assert isinstance(found, ShardPropagatingTensor) and found.shape == (2, 6, 4) and found.origins == {"w"}
    found.local.sum().backward()
    assert told == ["output", "input"] and local.grad is not None and local.grad.abs().sum() > 0
    assert type(unit(local)) is Tensor, "what is whole stays so"
