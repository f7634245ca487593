"""From a whole model to this rank's share of it, in the one order in which placements go together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paceline.place.exact import ExactReducer, Grid
from paceline.place.fsdp import FullySharded, shard_fully
from paceline.place.holding import Held, Holding, all_of, all_shares
from paceline.place.meeting import ThreadWorld
from paceline.place.parts import Part
from paceline.place.replicate import BucketReducer, LocalReducer, Reducer
from paceline.place.sharded import Data, Sharded, zero
from paceline.place.threads import ThreadReducer
from paceline.place.units import Named
from paceline.spec.layout import Layout
from paceline.world import World
from paceline.worlds import Worlds

ORDER = (
    ("stages", "first: what this rank does not hold is never split, wrapped or moved"),
    ("experts", "before tensors: an expert that went elsewhere is not cut here"),
    ("tensors", "before remat: what is recomputed is the split layer, with its messages"),
    ("context", "attention is asked for inside the layers as they are split"),
    ("remat", "before compile: a compiled block knows what it recomputes"),
    ("compile", "before shard: gathering happens around a compiled block, not inside it"),
    ("shard", "last of what changes parameters: it cuts what is left of each into rows"),
    ("replicate", "hooks on the parameters as they now are"),
)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What this rank holds and does. `named` is what its optimizer works on, `spread` what follows an update.

    `weights` are the parameters and buffers as the ranks' models hold them, `kept` the optimizers' parts of them.
    """

    named: Sequence[Named]
    weights: Holding
    kept: Holding
    reducer: Reducer
    spread: Callable[[], None]


def compose(
    model: nn.Module,
    *,
    named: Sequence[Named],
    asked: Layout,
    worlds: Worlds,
    grid: Grid | None,
    whole: Sequence[str] = (),
) -> Placed:
    """Place a model that is whole on every rank. `whole` names parameters whose update rule looks at all of them.

    Raises:
        LayoutError: something in the model can't be placed so.
    """
    if worlds.mesh.zero:
        return _sharded(model, named=named, asked=asked, worlds=worlds, grid=grid, whole=whole)
    return Placed(
        named=named,
        weights=Holding(world=worlds.every, held=all_of(model)),
        kept=Holding(world=worlds.every, held=all_shares(named)),
        reducer=_reducer(named, worlds, grid),
        spread=_nothing,
    )


def _reducer(named: Sequence[Named], worlds: Worlds, grid: Grid | None) -> Reducer:
    world = worlds.summed
    if grid is not None:
        return ExactReducer(named=named, world=world, grid=grid)
    return LocalReducer(named=named) if world.world_size == 1 else BucketReducer(named=named, world=world)


def _sharded(
    model: nn.Module, *, named: Sequence[Named], asked: Layout, worlds: Worlds, grid: Grid | None, whole: Sequence[str]
) -> Placed:
    data = Data(all=worlds.summed, shard=worlds.shard, replicas=worlds.mirrors)
    before = all_of(model)
    if worlds.mesh.zero == 3:
        chosen = FullySharded(
            params=torch.bfloat16 if asked.params == "bf16" else None, offload="parameters" in asked.offload
        )
        sharded = shard_fully(model, named=named, data=data, grid=grid, asked=chosen)
    else:
        sharded = zero(stage=worlds.mesh.zero, model=model, named=named, data=data, grid=grid, whole=whole)
    return Placed(
        named=sharded.shares,
        weights=Holding(world=worlds.every, held=[_held(one, sharded) for one in before]),
        kept=Holding(world=worlds.every, held=[_kept(s.name, s.part, s.parameter) for s in sharded.shares]),
        reducer=sharded.reducer,
        spread=sharded.spread,
    )


def _held(before: Held, sharded: Sharded) -> Held:
    """A parameter as it is held now; buffers stay whole."""
    part = sharded.parts.get(before.name)
    if part is None or before.is_buffer:
        return before
    return _kept(before.name, part, sharded.locals[before.name])


def _kept(name: str, part: Part, tensor: Tensor) -> Held:
    return Held(name=name, part=part, dtype=tensor.dtype, find=partial(Tensor.detach, tensor))


def _nothing() -> None:
    return None


def beside(named: Sequence[Named], *, home: Sequence[Named], world: ThreadWorld, grid: Grid | None) -> Placed:
    """A replica in a thread: its gradients end in the first replica's, `home`."""
    reducer: Reducer = ThreadReducer(named=named, home=home, world=world)
    if grid is not None:
        reducer = ExactReducer(named=named, world=world, grid=grid)
    alone = World(device=world.device)
    weights = Holding(world=alone, held=all_shares(named))
    return Placed(named=named, weights=weights, kept=weights, reducer=reducer, spread=_nothing)
