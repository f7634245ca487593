"""Ranks as threads of this process that hold random shards of a model, cut as no layout would cut it.

`truth` is one process's training state. `rank_of` is a rank that holds its parts of it, `hollow` one that holds
nothing yet; `play` lets all ranks do something together.
"""

import copy
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.checkpoint.optimizer_state import OptimizerShards
from paceline.checkpoint.state_outside_state_dict import NonPersistentBuffers
from paceline.checkpoint.train_state import TrainState
from paceline.comm.process_group import World
from paceline.comm.rank_threads import PeerFailed, thread_worlds
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec, row_range, shard_rows
from paceline.parallel.module_access.sharded_tensors import LocalTensor, ShardedTensors

T = TypeVar("T")
Cuts = Mapping[str, Sequence[ShardSpec]]


class Counter(nn.Module):
    """No tensor of its own, extra state that differs between ranks that do not run it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(6, 18)
        self.counter = Counter()
        self.register_buffer("cache", torch.zeros(7, 3), persistent=False)
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.register_buffer("mean", torch.zeros(9, dtype=torch.float64))


class Model(nn.Module):
    """Tied, with buffers of every kind, a scalar, a single row, nothing at all, bfloat16 and a convolution."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.conv = nn.Conv2d(4, 6, 3, bias=False).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(5, 2), requires_grad=False)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight


@dataclass
class Truth:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    averages: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict([*self.model.named_parameters(), *self.model.named_buffers()])

    @property
    def states(self) -> dict[str, dict[str, Tensor]]:
        names = {id(p): n for n, p in self.model.named_parameters()}
        return {names[id(p)]: state for p, state in self.optimizer.state.items()}


def truth(seed: int = 0) -> Truth:
    """A state in which no two numbers are alike."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = adamw([(n, p) for n, p in model.named_parameters() if p.requires_grad])
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        optimizer.step()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(torch.randn(buffer.shape))
        averages = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    for index, block in enumerate(model.blocks):
        block.counter.calls = 10 + index
    return Truth(model=model, optimizer=optimizer, averages=averages)


def adamw(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    large = [p for n, p in named if "weight" in n]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": [p for n, p in named if "weight" not in n]}]
    return torch.optim.AdamW(groups, lr=0.01)


def any_cut(shape: Sequence[int], *, ranks: int, rng: random.Random) -> list[ShardSpec]:
    """How the ranks hold a tensor: by rows, columns, heads of a fused one, stages, replicas, or rows of columns."""
    whole, none = ShardSpec.full(shape), ShardSpec.empty(shape)
    ways: list[Callable[[int], ShardSpec]] = [lambda r: whole]
    home = rng.randrange(ranks)
    ways.append(lambda r: whole if r == home else none)
    ways.append(
        lambda r: shard_rows(whole, shard_rank=r, num_shards=ranks) if shape else (whole if r == home else none)
    )
    if len(shape) > 1 and 0 not in shape:
        last = len(shape) - 1
        ways.append(lambda r: _ranges(shape, last, [row_range(shape[last], shard_rank=r, num_shards=ranks)]))
        ways.append(lambda r: _heads(shape, place=r, places=ranks))
    if len(shape) > 1 and ranks == 4:
        ways.append(lambda r: shard_rows(_heads(shape, place=r // 2, places=2), shard_rank=r % 2, num_shards=2))
    if ranks > 2:
        ways.append(
            lambda r: (
                shard_rows(whole, shard_rank=r % 2, num_shards=2)
                if shape and r < ranks // 2 * 2
                else none
                if shape
                else whole
            )
        )
    way = rng.choice(ways)
    return [way(rank) for rank in range(ranks)]


def _ranges(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> ShardSpec:
    return ShardSpec.from_ranges(shape, dim=dim, ranges=ranges)


def _heads(shape: Sequence[int], *, place: int, places: int) -> ShardSpec:
    """A part of each third of the rows, as of a fused query, key and value."""
    third = shape[0] // 3
    starts = [0, third, 2 * third]
    lengths = [third, third, shape[0] - 2 * third]
    cut = [row_range(n, shard_rank=place, num_shards=places) for n in lengths]
    return _ranges(shape, 0, [(s + a, s + b) for s, (a, b) in zip(starts, cut, strict=True)])


def cuts(model: nn.Module, *, ranks: int, rng: random.Random, whole: bool = False) -> Cuts:
    """For every tensor one."""
    named = [*model.named_parameters(), *model.named_buffers()]
    if whole:
        return {name: [ShardSpec.full(t.shape)] * ranks for name, t in named}
    found = {name: any_cut(t.shape, ranks=ranks, rng=rng) for name, t in named}
    # what stands once in a module tree is whole where it is there
    found |= {name: [ShardSpec.full(t.shape)] * ranks for name, t in named if name.endswith("table")}
    return found


def hollow(*, weights: Cuts, kept: Cuts, world: World, model: nn.Module | None = None) -> TrainState:
    """A rank that was just built: zeros of the right shapes."""
    model = model or Model()
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for tensor in tensors.values():
        tensor.detach().zero_()
    here = {
        name: t.detach()
        if (part := weights[name][world.rank]).local_shape == t.shape and part.is_full
        else _empty(t, part)
        for name, t in tensors.items()
    }
    for name, tensor in here.items():
        if (
            name.endswith("cache") and tensor.shape != tensors[name].shape
        ):  # a buffer is cut in its place; a rank with none of it has the other stage's
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_buffer(leaf, tensor, persistent=False)
    held = [
        LocalTensor(
            name=name,
            shard_spec=weights[name][world.rank],
            dtype=t.dtype,
            get_tensor=(lambda name=name: dict(model.named_buffers())[name])
            if name.endswith("cache")
            else (lambda name=name: here[name]),
            is_buffer=not isinstance(t, nn.Parameter),
        )
        for name, t in tensors.items()
    ]
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    named = [
        NamedParameter(index=i, name=n, parameter=nn.Parameter(_empty(p, kept[n][world.rank])))
        for i, (n, p) in enumerate(trainable)
    ]
    shares = [
        LocalTensor(
            name=m.name,
            shard_spec=kept[m.name][world.rank],
            dtype=m.parameter.dtype,
            get_tensor=lambda p=m.parameter: p,
        )
        for m in named
    ]
    ema_names = [name for name, _ in model.named_parameters()]
    live = [here[name] for name in ema_names]
    ema = SimpleNamespace(names=ema_names, averages=[torch.zeros_like(t) for t in live], weights=live, decay=0.9)
    optimizer = adamw([(m.name, m.parameter) for m in named])
    update: Any = SimpleNamespace(optimizers=[optimizer], lr_schedulers=[], scaler=None, ema=ema)
    return TrainState(
        model=model,
        update=update,
        non_persistent_buffers=NonPersistentBuffers(model),
        weights=ShardedTensors(world=world, tensors=held),
        optimizer_shards=OptimizerShards(
            parameters=named, sharded=ShardedTensors(world=world, tensors=shares), world=world
        ),
    )


def rank_of(found: Truth, *, weights: Cuts, kept: Cuts, world: World) -> TrainState:
    """A rank that holds its parts of the truth."""
    made = hollow(weights=weights, kept=kept, world=world)
    whole = found.tensors
    for name, held in made.weights.local_tensors.items():
        if held.tensor is not None:
            with torch.no_grad():
                held.get_tensor().copy_(held.shard_spec.extract(whole[name].detach()))
    for name, average in zip(made.update.ema.names, made.update.ema.averages, strict=True):
        part = made.weights.local_tensors[name].shard_spec
        if part.local_shape is not None:
            average.copy_(part.extract(found.averages[name]))
    for index, block in enumerate(made.model.blocks):
        first = next(r for r, part in enumerate(weights[f"blocks.{index}.fused.weight"]) if part.boxes)
        block.counter.calls = 10 + index if first == world.rank else -1
    for member in made.optimizer_shards.parameters:
        part = made.optimizer_shards.sharded.local_tensors[member.name].shard_spec
        if member.name in found.states and part.boxes:
            state = found.states[member.name]
            made.update.optimizers[0].state[member.parameter] = {
                key: part.extract(value) if value.shape == part.shape else value.clone() for key, value in state.items()
            }
    return made


def check(made: TrainState, found: Truth) -> None:
    """It holds its parts of the truth, bit for bit."""
    whole = found.tensors
    for name, held in made.weights.local_tensors.items():
        if held.tensor is not None:
            assert torch.equal(held.tensor, held.shard_spec.extract(whole[name].detach())), name
    for name, average in zip(made.update.ema.names, made.update.ema.averages, strict=True):
        part = made.weights.local_tensors[name].shard_spec
        assert part.local_shape is None or torch.equal(average, part.extract(found.averages[name])), name
    for name, value in found.model.named_buffers():
        if name.endswith("table"):
            assert torch.equal(dict(made.model.named_buffers())[name], value), name
    for index, block in enumerate(made.model.blocks):
        assert block.counter.calls == 10 + index
    for member in made.optimizer_shards.parameters:
        part = made.optimizer_shards.sharded.local_tensors[member.name].shard_spec
        state = made.update.optimizers[0].state.get(member.parameter, {})
        if part.boxes and part.numel:
            assert set(state) == set(found.states[member.name])
            for key, value in found.states[member.name].items():
                right = part.extract(value) if value.shape == part.shape else value
                assert torch.equal(state[key], right), (member.name, key)


def play(ranks: int, work: Callable[[World], T]) -> list[T]:
    """Every rank does it; the first that fails is heard, the others do not wait for it."""
    worlds = thread_worlds(replicas=ranks, world=World.alone(), timeout_seconds=30)
    found: list[Any] = [None] * ranks
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(worlds[rank])
        except PeerFailed:
            pass
        except BaseException as error:
            failed.append(error)
            found[rank] = error
            if ranks > 1:
                worlds[rank].rendezvous.end()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def copied(found: Truth) -> Truth:
    """Another of the same values."""
    return copy.deepcopy(found)


def _empty(tensor: Tensor, part: ShardSpec) -> Tensor:
    return torch.zeros((0,) if part.local_shape is None else part.local_shape, dtype=tensor.dtype)
