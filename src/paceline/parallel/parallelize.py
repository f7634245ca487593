"""Turn a whole model into this rank's part of it. `ORDER` is the only order in which the placements compose."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.comm.rank_threads import ThreadWorld
from paceline.config.activation_checkpointing import parse_remat
from paceline.config.compression import Compression
from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.errors import LayoutError
from paceline.parallel.activation_checkpointing.checkpointing import remat, repeated_blocks
from paceline.parallel.build_reducer import (
    Partition,
    Sharding,
    do_nothing,
    held_now,
    kept_now,
    partition_parameters,
    with_experts,
)
from paceline.parallel.compile import compile_blocks
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.data_parallel.thread_replicas import ThreadReducer
from paceline.parallel.expert_parallel.discovery import find_experts
from paceline.parallel.expert_parallel.expert_parallel import split_experts
from paceline.parallel.gradients.tied_parameters import ExactTies, TiedReducer
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.module_access.blocks import find_blocks
from paceline.parallel.module_access.parameters import NamedParameter, trainable_parameters
from paceline.parallel.module_access.shard_spec import Parts
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, all_of, all_shares
from paceline.parallel.module_access.user_hooks import hooked_in, refuse_lost
from paceline.parallel.pipeline.pipeline_model import PipelineModel, cut_model
from paceline.parallel.sharding.fully_sharded import DeferredRows
from paceline.parallel.sharding.sharded_model import DataGroups
from paceline.parallel.tensor_parallel.tensor_parallel import split_model
from paceline.parallel.tensor_parallel.tensor_plan import name_pattern
from paceline.parallel.trace_example_forward import ExampleRun, seconds_of, tensor_plan
from paceline.planner.layout.mesh import layout_label

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
class ParallelizedModel:
    """A model after placement, as this rank holds it.

    The optimizer updates the parameters in `named`. Call `spread` after each optimizer update, and `settle` after
    the model's own tensors were given other values. `weights` are the parameters and buffers as the ranks' models
    hold them, `kept` the parts of them that the optimizers hold. Autograd writes gradients to `leaves`; `hooked`
    names the parameters with user-registered hooks.
    """

    named: Sequence[NamedParameter]
    weights: ShardedTensors
    kept: ShardedTensors
    reducer: Reducer
    spread: Callable[[], None]
    settle: Callable[[], None]
    leaves: Sequence[nn.Parameter] = ()
    piped: PipelineModel | None = None
    grid: FixedPointGrid | None = None
    undos: Sequence[Callable[[], None]] = ()
    context: ContextParallel | None = None
    hooked: tuple[str, ...] = ()

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters of `named` that this rank owns; a parameter held by several ranks has one owner."""
        whole = self.kept.is_whole
        return [m.parameter for m in self.named if whole or self.kept.owns(m.name)]

    def close(self) -> None:
        """Remove the wrappers around the model's modules, in reverse order."""
        for undo in reversed(self.undos):
            undo()


def parallelize(
    model: nn.Module,
    *,
    asked: Layout,
    worlds: MeshGroups,
    example: ExampleRun | None,
    say: Callable[[str], None],
    how: PlacementSettings | None = None,
    exact: bool = False,
    compiles: bool = False,
    whole: Sequence[str] = (),
    context: ContextParallel | None = None,
    rows: DeferredRows | None = None,
    late: DeferredModel | None = None,
    compress: Compression | None = None,
) -> ParallelizedModel:
    """Place a model that is whole on every rank. `example` runs forward and loss on one microbatch; pp needs it.

    `whole` names the parameters whose update rule needs the whole tensor; `say` receives messages for the user.
    `rows` are this rank's rows of parameters without memory; `late` fills them once the parts are known.

    Raises:
        LayoutError: a part of the model does not support the requested layout.
    """
    mesh, how = worlds.mesh, how or PlacementSettings()
    before, every, hooked = all_of(model), trainable_parameters(model), hooked_in(model)
    uses = TiedUses(model) if exact else None
    shaped = _shaped(model, asked=asked, worlds=worlds, example=example, how=how, compiles=compiles, say=say, late=late)
    rows = rows if late is None else _filled(model, late, shaped, worlds)
    undos = _wrapped(model, asked=asked, how=how, compiles=compiles, piped=shaped.piped, say=say)
    grid = None if uses is None else _grid(every, uses, shaped.piped, worlds)
    by = Sharding(
        asked=asked,
        how=how,
        stage=mesh.zero,
        data=DataGroups(all=worlds.summed, shard=worlds.shard, replicas=worlds.mirrors, compress=compress),
        grid=grid,
        base=shaped.base,
        hollow=None if shaped.piped is None else shaped.piped.hollow,
        without=shaped.routed,
        whole=whole,
        rows=rows,
    )
    split = _split(model, _live(every, model, without=shaped.hollow), by=by, routed=shaped.routed, peers=worlds.peers)
    kept = [kept_now(one, split.share(one.name), shaped.base) for one in every]
    refuse_lost(hooked, model, without=shaped.hollow, layout=layout_label(asked, mesh))
    return ParallelizedModel(
        named=split.named,
        weights=ShardedTensors(world=worlds.every, held=[held_now(one, split, shaped.hollow) for one in before]),
        kept=ShardedTensors(world=worlds.every, held=kept),
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
    """The model after pipeline, expert and tensor parallelism.

    `base` gives the part that each parameter of this rank is of the whole, `routed` the experts' parts; `hollow` names
    the parameters of which this rank holds nothing.
    """

    piped: PipelineModel | None
    base: Parts
    routed: Parts
    hollow: frozenset[str]


def _shaped(
    model: nn.Module,
    *,
    asked: Layout,
    worlds: MeshGroups,
    example: ExampleRun | None,
    how: PlacementSettings,
    compiles: bool,
    say: Callable[[str], None],
    late: DeferredModel | None,
) -> _Shaped:
    mesh = worlds.mesh
    whole = {one.name: one.part for one in all_of(model) if not one.is_buffer}
    if mesh.ep > 1 and mesh.tp > 1:  # each expert stays whole on the ranks that split the rest
        how = replace(how, replicate=(*how.replicate, *(name_pattern(one.name) for one in find_experts(model))))
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


def _filled(model: nn.Module, late: DeferredModel, shaped: _Shaped, worlds: MeshGroups) -> DeferredRows:
    shard = worlds.shard if worlds.mesh.zero == 3 and worlds.shard.world_size > 1 else None
    return late.fill(model, base=shaped.base, hollow=shaped.hollow, routed=shaped.routed, shard=shard)


def _wrapped(
    model: nn.Module,
    *,
    asked: Layout,
    how: PlacementSettings,
    compiles: bool,
    piped: PipelineModel | None,
    say: Callable[[str], None],
) -> list[Callable[[], None]]:
    """Wrap the blocks in activation checkpointing and `torch.compile`; return the functions that undo it."""
    blocks = find_blocks(model, listed=how.blocks) if how.blocks else None
    undos = [remat(model, policy=parse_remat(asked.remat), blocks=blocks)]
    if compiles and not blocks and piped is not None and piped.along_graph and not repeated_blocks(model):
        say("note: no block is compiled: stages along a graph call the model's own modules, none of which repeats")
    elif compiles:
        undos.append(compile_blocks(model, say=say, blocks=blocks))
    return undos


def _split(model: nn.Module, live: Sequence[NamedParameter], *, by: Sharding, routed: Parts, peers: World) -> Partition:
    """Divide this rank's parameters over the data-parallel ranks; expert parameters stay whole."""
    split = partition_parameters(model, named=[member for member in live if member.name not in routed], by=by)
    return with_experts(split, live=live, peers=peers, routed=routed) if routed else split


def _live(every: Sequence[NamedParameter], model: nn.Module, *, without: Collection[str]) -> list[NamedParameter]:
    """Return the members of `every` that are not in `without`, each with the model's current parameter of that name."""
    now = dict(model.named_parameters())
    return [replace(member, parameter=now[member.name]) for member in every if member.name not in without]


def _tied(split: Partition, piped: PipelineModel | None, worlds: MeshGroups) -> Reducer:
    if piped is None or not piped.ties:
        return split.reducer
    return TiedReducer(split.reducer, named=split.named, ties=piped.ties, world=worlds.pp)


def _grid(
    every: Sequence[NamedParameter], uses: TiedUses, piped: PipelineModel | None, worlds: MeshGroups
) -> FixedPointGrid:
    """Return the fixed-point grid of exact mode. From now on each use of a tied weight is a summand of its own.

    This holds in one process and across pipeline stages.

    Raises:
        LayoutError: several stages use a weight under one module name, so its uses can't be told apart.
    """
    ties = {} if piped is None else piped.ties
    for name in sorted(set(ties) - uses.names):
        raise LayoutError(
            f"exact mode with pp: {name} is used on the stages of ranks {', '.join(map(str, ties[name]))} by one name.",
            cause="one process adds the gradients of its uses before they are rounded to the grid, stages after",
            hint="a module of its own for each use, with the weight tied (head.weight = embed.weight); "
            "or leave --train.exact out",
        )
    grid = FixedPointGrid(names=[member.name for member in every], others=[worlds.pp], uses=uses)
    if ties:
        uses.crossing = frozenset(ties)
        grid.tie(ExactTies(ties, world=worlds.pp))
    uses.watch()
    return grid


def parallelize_thread_replica(
    model: nn.Module,
    *,
    named: Sequence[NamedParameter],
    home: Sequence[NamedParameter],
    world: ThreadWorld,
    exact: bool,
) -> ParallelizedModel:
    """Return the placement of a replica that runs in a thread; its gradients go to the first replica's, `home`."""
    reducer: Reducer = ThreadReducer(named=named, home=home, world=world)
    grid = None
    if exact:
        uses = TiedUses(model)
        grid = FixedPointGrid(names=[member.name for member in named], uses=uses)
        reducer = ExactReducer(named=named, world=world, grid=grid)
        uses.watch()
    alone = World(device=world.device)
    weights = ShardedTensors(world=alone, held=all_shares(named))
    return ParallelizedModel(
        named=named, weights=weights, kept=weights, reducer=reducer, spread=do_nothing, settle=do_nothing, grid=grid
    )
