"""From a whole model to this rank's share of it, in the one order in which placements go together."""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.place.blocks import find_blocks
from paceline.place.both import BothReducers
from paceline.place.compile import compile_blocks
from paceline.place.context import ContextParallel
from paceline.place.exact import ExactReducer, Grid
from paceline.place.experts import split_experts
from paceline.place.fsdp import chosen, shard_fully
from paceline.place.holding import Held, Holding, all_of, all_shares
from paceline.place.meeting import ThreadWorld
from paceline.place.parts import Part, Parts
from paceline.place.pipe import Piped, cut_model
from paceline.place.remat import remat
from paceline.place.replicate import BucketReducer, LocalReducer, Reducer
from paceline.place.runs import Runs, tensor_plan
from paceline.place.sharded import Data, zero
from paceline.place.share import Share
from paceline.place.tensor.placed import split_model
from paceline.place.threads import ThreadReducer
from paceline.place.ties import TiedReducer
from paceline.place.units import Named, trainable
from paceline.spec.layout import Layout
from paceline.spec.remat import parse_remat
from paceline.spec.settings import Place
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
    `leaves` are what autograd writes to.
    """

    named: Sequence[Named]
    weights: Holding
    kept: Holding
    reducer: Reducer
    spread: Callable[[], None]
    leaves: Sequence[nn.Parameter] = ()
    piped: Piped | None = None
    grid: Grid | None = None
    undos: Sequence[Callable[[], None]] = ()
    context: ContextParallel | None = None

    def owned(self) -> list[nn.Parameter]:
        """Those of `named` that this rank answers for, where several hold the same."""
        whole = self.kept.is_whole
        return [m.parameter for m in self.named if whole or self.kept.owns(m.name)]

    def close(self) -> None:
        """Take back what was wrapped around the model's modules."""
        for undo in reversed(self.undos):
            undo()


def compose(
    model: nn.Module,
    *,
    asked: Layout,
    worlds: Worlds,
    example: Runs | None,
    say: Callable[[str], None],
    how: Place | None = None,
    exact: bool = False,
    compiles: bool = False,
    whole: Sequence[str] = (),
    context: ContextParallel | None = None,
    rows: MutableMapping[str, Tensor] | None = None,
) -> Placed:
    """Place a model that is whole on every rank. `example` runs forward and loss on one microbatch; pp needs it.

    `whole` names parameters whose update rule looks at all of them; `say` hears what is to be told. `rows` are this
    rank's rows of parameters that have no memory yet, for a model that is sharded and nothing else.

    Raises:
        LayoutError: something in the model can't be placed so.
    """
    mesh, how = worlds.mesh, how or Place()
    before = all_of(model)
    every = trainable(model)
    plan = tensor_plan(model, how, mesh.tp, example) if mesh.tp > 1 else None
    piped = None
    if mesh.pp > 1:
        assert example is not None
        splits = mesh.zero != 3 and not parse_remat(asked.remat).is_on and not compiles
        piped = cut_model(model, asked=asked, mesh=mesh, world=worlds.pp, call=example, how=how, splits=splits)
    blocks = find_blocks(model, listed=how.blocks) if how.blocks else None
    hollow = frozenset[str]() if piped is None else piped.hollow
    experts = split_experts(model=model, world=worlds.ep) if mesh.ep > 1 else None
    tensors = None if plan is None else split_model(model, plan=plan, world=worlds.tp, sequence=asked.sequence)
    base: Parts = {} if tensors is None else tensors.parts
    routed: Parts = {} if experts is None else experts.parts
    if experts is not None:
        base = {**{one.name: one.part for one in before if not one.is_buffer}, **base, **routed}
        hollow |= {name for name, part in routed.items() if part.local is None}
    if piped is not None and tensors is not None:
        piped.stages.on_leave.append(tensors.rest)
    live = [_live(member, model) for member in every if member.name not in hollow]
    named = [member for member in live if member.name not in routed]
    theirs = [member for member in live if member.name in routed]
    undos = [remat(model, policy=parse_remat(asked.remat), blocks=blocks)]
    if compiles:
        undos.append(compile_blocks(model, say=say, blocks=blocks))
    grid = Grid(names=[member.name for member in every], others=[worlds.pp]) if exact else None
    if mesh.zero:
        data = Data(all=worlds.summed, shard=worlds.shard, replicas=worlds.mirrors)
        sharding = _Sharding(
            asked=asked,
            how=how,
            stage=mesh.zero,
            data=data,
            grid=grid,
            base=base,
            piped=piped,
            without=routed,
            rows=rows,
        )
        split = _sharded(model, named=named, by=sharding, whole=whole)
    else:
        leaves = [member.parameter for member in named]
        reduces = _reducer(named, worlds.summed, grid)
        split = _Split(named=named, parts=base, tensors={}, reducer=reduces, spread=_nothing, leaves=leaves)
    split = split if experts is None else _with_experts(split, theirs, worlds, routed)
    shares = {share.name: share for share in split.named}
    reducer = split.reducer
    if piped is not None and piped.ties:
        if exact:
            raise _tied_exact(piped)
        reducer = TiedReducer(reducer, named=split.named, ties=piped.ties, world=worlds.pp)
    return Placed(
        named=split.named,
        weights=Holding(world=worlds.every, held=[_held(one, split, hollow) for one in before]),
        kept=Holding(world=worlds.every, held=[_kept(one, shares.get(one.name), base) for one in every]),
        reducer=reducer,
        spread=split.spread,
        leaves=split.leaves,
        piped=piped,
        grid=grid,
        undos=undos,
        context=context,
    )


@dataclass(frozen=True, kw_only=True)
class _Split:
    """What becomes of the parameters: those of the optimizer, and where the model's own are cut, which part it has."""

    named: Sequence[Named]
    parts: Mapping[str, Part]
    tensors: Mapping[str, Tensor]
    reducer: Reducer
    spread: Callable[[], None]
    leaves: Sequence[nn.Parameter]


def _live(member: Named, model: nn.Module) -> Named:
    """The parameter that now stands under this name."""
    parameter = model.get_parameter(member.name)
    return Named(index=member.index, name=member.name, parameter=parameter)


def _reducer(named: Sequence[Named], world: World, grid: Grid | None) -> Reducer:
    if grid is not None:
        return ExactReducer(named=named, world=world, grid=grid)
    return LocalReducer(named=named) if world.world_size == 1 else BucketReducer(named=named, world=world)


@dataclass(frozen=True, kw_only=True)
class _Sharding:
    """How parameters are sharded, and what was done to them before."""

    asked: Layout
    how: Place
    stage: int
    data: Data
    grid: Grid | None
    base: Parts
    piped: Piped | None
    without: Collection[str]
    rows: MutableMapping[str, Tensor] | None


def _sharded(model: nn.Module, *, named: Sequence[Named], by: _Sharding, whole: Sequence[str]) -> _Split:
    parts = by.base or None
    if by.stage == 3:
        wanted = chosen(model, asked=by.asked, how=by.how)
        hollow = None if by.piped is None else by.piped.hollow
        sharded = shard_fully(
            model,
            named=named,
            data=by.data,
            grid=by.grid,
            parts=parts,
            asked=wanted,
            hollow=hollow,
            without=by.without,
            rows=by.rows,
        )
    else:
        sharded = zero(stage=by.stage, model=model, named=named, data=by.data, grid=by.grid, parts=parts, whole=whole)
    return _Split(
        named=sharded.shares,
        parts=sharded.parts,
        tensors=sharded.locals,
        reducer=sharded.reducer,
        spread=sharded.spread,
        leaves=sharded.sources,
    )


def _with_experts(split: _Split, theirs: Sequence[Named], worlds: Worlds, routed: Parts) -> _Split:
    """Experts stay as they are held: a token's gradient has come to them, so only their other holders add theirs."""
    own = _reducer(theirs, worlds.peers, None)
    return replace(
        split,
        named=sorted([*split.named, *theirs], key=lambda member: member.index),
        leaves=[*split.leaves, *(member.parameter for member in theirs)],
        parts={**split.parts, **routed},
        tensors={name: tensor for name, tensor in split.tensors.items() if name not in routed},
        reducer=BothReducers([split.reducer, own], meets=True),
    )


def _held(before: Held, split: _Split, hollow: Collection[str]) -> Held:
    """A parameter or buffer as this rank's model holds it now."""
    if before.name in hollow:
        return replace(before, part=Part.none_of(before.part.shape))
    part = split.parts.get(before.name)
    if part is None or before.is_buffer:
        return before
    if before.name not in split.tensors:
        return replace(before, part=part)
    return replace(before, part=part, find=partial(Tensor.detach, split.tensors[before.name]))


def _kept(member: Named, share: Named | None, base: Parts) -> Held:
    """The part of it that this rank's optimizer has."""
    shape, dtype = member.parameter.shape, member.parameter.dtype
    if share is None:
        return Held(name=member.name, part=Part.none_of(shape), dtype=dtype, find=_absent)
    part = share.part if isinstance(share, Share) else base.get(member.name, Part.all_of(shape))
    return Held(name=member.name, part=part, dtype=dtype, find=partial(Tensor.detach, share.parameter))


def _tied_exact(piped: Piped) -> LayoutError:
    name, ranks = next(iter(piped.ties.items()))
    return LayoutError(
        f"exact mode with pp: {name} is used on the stages of ranks {', '.join(map(str, ranks))}.",
        cause="one process adds the gradients of its uses before they are rounded to the grid, stages after",
        hint="leave --train.exact out, or do not tie the weights",
    )


def _absent() -> Tensor:
    raise AssertionError("this rank has nothing of it")


def _nothing() -> None:
    return None


def beside(named: Sequence[Named], *, home: Sequence[Named], world: ThreadWorld, grid: Grid | None) -> Placed:
    """A replica in a thread: its gradients end in the first replica's, `home`."""
    reducer: Reducer = ThreadReducer(named=named, home=home, world=world)
    if grid is not None:
        reducer = ExactReducer(named=named, world=world, grid=grid)
    alone = World(device=world.device)
    weights = Holding(world=alone, held=all_shares(named))
    return Placed(named=named, weights=weights, kept=weights, reducer=reducer, spread=_nothing, grid=grid)
