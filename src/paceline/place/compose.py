"""From a whole model to this rank's share of it, in the one order in which placements go together."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn

from paceline.errors import LayoutError
from paceline.place.blocks import find_blocks
from paceline.place.compile import compile_blocks
from paceline.place.context.sequence import ContextParallel
from paceline.place.divide import Sharding, Split, divided, held_now, kept_now, nothing, with_experts
from paceline.place.exact import ExactReducer, Grid
from paceline.place.experts.find import find_experts
from paceline.place.experts.spread import split_experts
from paceline.place.holding import Holding, all_of, all_shares
from paceline.place.hooked import hooked_in, refuse_lost
from paceline.place.late import Late
from paceline.place.meeting import ThreadWorld
from paceline.place.parts import Parts
from paceline.place.remat import remat, repeated
from paceline.place.replicate import Reducer
from paceline.place.runs import Runs, seconds_of, tensor_plan
from paceline.place.shard.fsdp import Rows
from paceline.place.shard.sharded import Data
from paceline.place.stage.pipe import Piped, cut_model
from paceline.place.stage.ties import TiedReducer, Ties
from paceline.place.tensor.placed import split_model
from paceline.place.tensor.plan import common
from paceline.place.threads import ThreadReducer
from paceline.place.units import Named, trainable
from paceline.place.uses import Uses
from paceline.plan.mesh import label
from paceline.spec.compress import Compress
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
    """What this rank holds and does. `named` is what its optimizer works on, `spread` what follows an update, `settle`
    what follows where the model's own tensors got other values.

    `weights` are the parameters and buffers as the ranks' models hold them, `kept` the optimizers' parts of them.
    `leaves` are what autograd writes to, `hooked` the parameters that have hooks of the user's own.
    """

    named: Sequence[Named]
    weights: Holding
    kept: Holding
    reducer: Reducer
    spread: Callable[[], None]
    settle: Callable[[], None]
    leaves: Sequence[nn.Parameter] = ()
    piped: Piped | None = None
    grid: Grid | None = None
    undos: Sequence[Callable[[], None]] = ()
    context: ContextParallel | None = None
    hooked: tuple[str, ...] = ()

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
    rows: Rows | None = None,
    late: Late | None = None,
    compress: Compress | None = None,
) -> Placed:
    """Place a model that is whole on every rank. `example` runs forward and loss on one microbatch; pp needs it.

    `whole` names parameters whose rule looks at all of them, `say` hears what is told, `rows` are this rank's of what
    has no memory, `late` gives that its values when the parts are known, `compress` says how gradients are sent.

    Raises:
        LayoutError: something in the model can't be placed so.
    """
    mesh, how = worlds.mesh, how or Place()
    before, every, hooked = all_of(model), trainable(model), hooked_in(model)
    uses = Uses(model) if exact else None
    shaped = _shaped(model, asked=asked, worlds=worlds, example=example, how=how, compiles=compiles, say=say, late=late)
    rows = rows if late is None else _filled(model, late, shaped, worlds)
    undos = _wrapped(model, asked=asked, how=how, compiles=compiles, piped=shaped.piped, say=say)
    grid = None if uses is None else _grid(every, uses, shaped.piped, worlds)
    live = _live(every, model, without=shaped.hollow)
    by = Sharding(
        asked=asked,
        how=how,
        stage=mesh.zero,
        data=Data(all=worlds.summed, shard=worlds.shard, replicas=worlds.mirrors, compress=compress),
        grid=grid,
        base=shaped.base,
        hollow=None if shaped.piped is None else shaped.piped.hollow,
        without=shaped.routed,
        whole=whole,
        rows=rows,
    )
    split = _split(model, live, by=by, routed=shaped.routed, peers=worlds.peers)
    refuse_lost(hooked, model, without=shaped.hollow, layout=label(asked, mesh))
    return Placed(
        named=split.named,
        weights=Holding(world=worlds.every, held=[held_now(one, split, shaped.hollow) for one in before]),
        kept=Holding(world=worlds.every, held=[kept_now(one, split.share(one.name), shaped.base) for one in every]),
        reducer=split.reducer if exact else _tied(split, shaped.piped, worlds),
        spread=split.spread,
        settle=split.settle,
        leaves=split.leaves,
        piped=shaped.piped,
        grid=grid,
        undos=undos,
        context=context,
        hooked=tuple(hooked),
    )


@dataclass(frozen=True, kw_only=True)
class _Shaped:
    """After stages, experts and tensors: which parts this rank's parameters are, and which it has nothing of."""

    piped: Piped | None
    base: Parts
    routed: Parts
    hollow: frozenset[str]


def _shaped(
    model: nn.Module,
    *,
    asked: Layout,
    worlds: Worlds,
    example: Runs | None,
    how: Place,
    compiles: bool,
    say: Callable[[str], None],
    late: Late | None,
) -> _Shaped:
    mesh = worlds.mesh
    whole = {one.name: one.part for one in all_of(model) if not one.is_buffer}
    if mesh.ep > 1 and mesh.tp > 1:  # each expert stays whole on the ranks that split the rest
        how = replace(how, replicate=(*how.replicate, *(common(one.name) for one in find_experts(model))))
    plan = tensor_plan(model, how, mesh.tp, example, late) if mesh.tp > 1 else None
    piped = None
    if mesh.pp > 1:
        assert example is not None
        splits = mesh.zero != 3 and not parse_remat(asked.remat).is_on and not compiles
        piped = cut_model(
            model,
            asked=asked,
            mesh=mesh,
            world=worlds.pp,
            call=example,
            how=how,
            say=say,
            splits=splits,
            seconds=seconds_of(model, how, worlds.every, example, late),
            late=late,
        )
    experts = split_experts(model=model, world=worlds.ep) if mesh.ep > 1 else None
    tensors = None if plan is None else split_model(model, plan=plan, world=worlds.tp, sequence=asked.sequence)
    if piped is not None and tensors is not None:
        piped.stages.on_leave.append(tensors.rest)
    routed: Parts = {} if experts is None else experts.parts
    base: Parts = {**whole, **({} if tensors is None else tensors.parts), **routed} if experts or tensors else {}
    hollow = frozenset[str]() if piped is None else piped.hollow
    hollow |= {name for name, part in routed.items() if part.local is None}
    return _Shaped(piped=piped, base=base, routed=routed, hollow=hollow)


def _filled(model: nn.Module, late: Late, shaped: _Shaped, worlds: Worlds) -> Rows:
    shard = worlds.shard if worlds.mesh.zero == 3 and worlds.shard.world_size > 1 else None
    return late.fill(model, base=shaped.base, hollow=shaped.hollow, routed=shaped.routed, shard=shard)


def _wrapped(
    model: nn.Module, *, asked: Layout, how: Place, compiles: bool, piped: Piped | None, say: Callable[[str], None]
) -> list[Callable[[], None]]:
    """What is wrapped around blocks; the undos."""
    blocks = find_blocks(model, listed=how.blocks) if how.blocks else None
    undos = [remat(model, policy=parse_remat(asked.remat), blocks=blocks)]
    if compiles and not blocks and piped is not None and piped.along_graph and not repeated(model):
        say("note: no block is compiled: stages along a graph call the model's own modules, and none repeats")
    elif compiles:
        undos.append(compile_blocks(model, say=say, blocks=blocks))
    return undos


def _split(model: nn.Module, live: Sequence[Named], *, by: Sharding, routed: Parts, peers: World) -> Split:
    """What is left of each parameter after stages, experts and tensors, divided; experts stay whole."""
    split = divided(model, named=[member for member in live if member.name not in routed], by=by)
    return with_experts(split, live=live, peers=peers, routed=routed) if routed else split


def _live(every: Sequence[Named], model: nn.Module, *, without: Collection[str]) -> list[Named]:
    """The parameters that now stand under these names."""
    now = dict(model.named_parameters())
    return [replace(member, parameter=now[member.name]) for member in every if member.name not in without]


def _tied(split: Split, piped: Piped | None, worlds: Worlds) -> Reducer:
    if piped is None or not piped.ties:
        return split.reducer
    return TiedReducer(split.reducer, named=split.named, ties=piped.ties, world=worlds.pp)


def _grid(every: Sequence[Named], uses: Uses, piped: Piped | None, worlds: Worlds) -> Grid:
    """Of exact mode. From here on each use of a tied weight is a summand, in one process and on stages alike.

    Raises:
        LayoutError: what several stages use is no weight of several modules, so its uses can't be told apart.
    """
    ties = {} if piped is None else piped.ties
    for name in sorted(set(ties) - uses.names):
        raise LayoutError(
            f"exact mode with pp: {name} is used on the stages of ranks {', '.join(map(str, ties[name]))} by one name.",
            cause="one process adds the gradients of its uses before they are rounded to the grid, stages after",
            hint="a module of its own for each use, with the weight tied (head.weight = embed.weight); "
            "or leave --train.exact out",
        )
    grid = Grid(names=[member.name for member in every], others=[worlds.pp], uses=uses)
    if ties:
        uses.crossing = frozenset(ties)
        grid.tie(Ties(ties, world=worlds.pp))
    uses.watch()
    return grid


def beside(
    model: nn.Module, *, named: Sequence[Named], home: Sequence[Named], world: ThreadWorld, exact: bool
) -> Placed:
    """A replica in a thread: its gradients end in the first replica's, `home`."""
    reducer: Reducer = ThreadReducer(named=named, home=home, world=world)
    grid = None
    if exact:
        uses = Uses(model)
        grid = Grid(names=[member.name for member in named], uses=uses)
        reducer = ExactReducer(named=named, world=world, grid=grid)
        uses.watch()
    alone = World(device=world.device)
    weights = Holding(world=alone, held=all_shares(named))
    return Placed(
        named=named, weights=weights, kept=weights, reducer=reducer, spread=nothing, settle=nothing, grid=grid
    )
