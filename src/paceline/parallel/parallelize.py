"""Turn a whole model into this rank's part of it. `PARALLELISMS` is the only order in which the parts compose."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import ThreadWorld
from paceline.config.activation_checkpointing import parse_remat
from paceline.errors import LayoutError
from paceline.parallel.activation_checkpointing.checkpointing import remat, repeated_blocks
from paceline.parallel.compile import compile_blocks
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.data_parallel.thread_replicas import ThreadReducer
from paceline.parallel.expert_parallel.discovery import find_experts
from paceline.parallel.expert_parallel.expert_parallel import split_experts
from paceline.parallel.gradients.partition import (
    divide_fully,
    divide_rows,
    do_nothing,
    held_now,
    kept_now,
    replicate,
    with_experts,
)
from paceline.parallel.gradients.tied_parameters import ExactTies, TiedReducer
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.module_access.blocks import find_blocks
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, all_shares
from paceline.parallel.module_access.user_hooks import hooked_in, refuse_lost
from paceline.parallel.pipeline.pipeline_model import PipelineModel, cut_model
from paceline.parallel.placement import Parallelism, ParallelizedModel, Placement, PlacementRequest
from paceline.parallel.tensor_parallel.tensor_parallel import split_model
from paceline.parallel.tensor_parallel.tensor_plan import name_pattern
from paceline.parallel.trace_example_forward import seconds_of, tensor_plan
from paceline.planner.layout.mesh import layout_label


@dataclass(frozen=True)
class ParallelismEntry:
    """One row of `PARALLELISMS`: what is applied, and why it stands where it does.

    `layouts` are the layouts that consist of this parallelism alone; `cost` is the field of the planner's `StepTime`
    that grows with it. Both are empty for what only comes along with other entries.
    """

    parallelism: Parallelism
    reason: str
    layouts: tuple[str, ...] = ()
    cost: str = ""


class TiedUseRecords:
    """The uses of each tied weight, which exact mode adds one by one."""

    name = "tied uses"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether gradients are added exactly."""
        return request.exact

    def apply(self, placement: Placement) -> None:
        """Find the uses."""
        placement.uses = TiedUses(placement.model)


class TensorPlanning:
    """The plan by which weights are split over the `tp` ranks."""

    name = "tensor plan"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether weights are split."""
        return request.worlds.mesh.tp > 1

    def apply(self, placement: Placement) -> None:
        """Choose the plan. With experts, each expert stays whole on the ranks that split the rest."""
        request, mesh, how = placement.request, placement.request.worlds.mesh, placement.request.how
        if mesh.ep > 1:
            experts = (name_pattern(one.name) for one in find_experts(placement.model))
            how = replace(how, replicate=(*how.replicate, *experts))
        placement.tensor_plan = tensor_plan(placement.model, how, mesh.tp, request.example, request.late)


class PipelineStages:
    """Pipeline parallelism: this rank keeps its stages of the model."""

    name = "stages"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether there are several stages."""
        return request.worlds.mesh.pp > 1

    def apply(self, placement: Placement) -> None:
        """Cut the model, and free the memory of the other stages."""
        request, worlds = placement.request, placement.request.worlds
        assert request.example is not None
        placement.piped = cut_model(
            placement.model,
            asked=request.asked,
            mesh=worlds.mesh,
            world=worlds.pp,
            call=request.example,
            how=request.how,
            say=request.say,
            splits=worlds.mesh.zero != 3 and not parse_remat(request.asked.remat).is_on and not request.compiles,
            seconds=seconds_of(placement.model, request.how, worlds.all_ranks, request.example, request.late),
            late=request.late,
        )


class ExpertParallel:
    """Expert parallelism: this rank keeps its experts, and tokens travel to theirs."""

    name = "experts"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the experts are distributed."""
        return request.worlds.mesh.ep > 1

    def apply(self, placement: Placement) -> None:
        """Keep this rank's experts, and route tokens."""
        placement.experts = split_experts(model=placement.model, world=placement.request.worlds.ep)


class TensorParallel:
    """Tensor parallelism: this rank keeps its slices of the large weights."""

    name = "tensors"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether weights are split."""
        return request.worlds.mesh.tp > 1

    def apply(self, placement: Placement) -> None:
        """Split the weights by the plan."""
        request, plan = placement.request, placement.tensor_plan
        assert plan is not None
        split = split_model(placement.model, plan=plan, world=request.worlds.tp, sequence=request.asked.sequence)
        if placement.piped is not None:
            placement.piped.stages.on_leave.append(split.rest)
        placement.split = split


class ContextParallelism:
    """Context parallelism: sequences are sharded, and attention runs over the `cp` ranks."""

    name = "context"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether sequences are sharded."""
        return request.context is not None

    def apply(self, placement: Placement) -> None:
        """Hand the context to the step, which enters it around each forward."""
        placement.context = placement.request.context


class DeferredValues:
    """The values of a model that was built without memory."""

    name = "values"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the model has no memory yet."""
        return request.late is not None

    def apply(self, placement: Placement) -> None:
        """Fill what this rank keeps; rows that fully sharded units need are made when they are taken."""
        late, worlds = placement.request.late, placement.request.worlds
        assert late is not None
        shard = worlds.shard if worlds.mesh.zero == 3 and worlds.shard.world_size > 1 else None
        placement.rows = late.fill(
            placement.model, base=placement.base, hollow=placement.hollow, routed=placement.routed, shard=shard
        )


class ListedBlocks:
    """The blocks that the user lists with `place.blocks`."""

    name = "listed blocks"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether blocks are listed."""
        return bool(request.how.blocks)

    def apply(self, placement: Placement) -> None:
        """Find the blocks."""
        placement.blocks = find_blocks(placement.model, listed=placement.request.how.blocks)


class ActivationCheckpointing:
    """Blocks that recompute their activations in backward."""

    name = "remat"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether blocks recompute."""
        return parse_remat(request.asked.remat).is_on

    def apply(self, placement: Placement) -> None:
        """Wrap the blocks."""
        policy = parse_remat(placement.request.asked.remat)
        placement.undos.append(remat(placement.model, policy=policy, blocks=placement.blocks))


class Compilation:
    """Blocks that `torch.compile` compiles."""

    name = "compile"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether blocks are compiled."""
        return request.compiles

    def apply(self, placement: Placement) -> None:
        """Compile the blocks, if there is one that a stage calls."""
        model, piped, say = placement.model, placement.piped, placement.request.say
        if not placement.blocks and piped is not None and piped.along_graph and not repeated_blocks(model):
            say("note: no block is compiled: stages along a graph call the model's own modules, none of which repeats")
        else:
            placement.undos.append(compile_blocks(model, say=say, blocks=placement.blocks))


class FixedPoint:
    """The fixed-point grid on which exact mode adds gradients."""

    name = "exact"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether gradients are added exactly."""
        return request.exact

    def apply(self, placement: Placement) -> None:
        """Make the grid."""
        assert placement.uses is not None
        placement.grid = _grid(placement.named, placement.uses, placement.piped, placement.request.worlds.pp)


class FullSharding:
    """ZeRO stage 3: parameters, gradients and optimizer state are divided, and units are gathered when they run."""

    name = "shard"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether parameters are divided."""
        return request.worlds.mesh.zero == 3

    def apply(self, placement: Placement) -> None:
        """Divide each parameter into rows."""
        placement.apply_data_parallel(partial(divide_fully, placement.model))


class ShardedOptimizer:
    """ZeRO stages 1 and 2: the optimizer state, and at stage 2 the gradients, are divided."""

    name = "shard optimizer"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the optimizer state is divided, and parameters are not."""
        return request.worlds.mesh.zero in (1, 2)

    def apply(self, placement: Placement) -> None:
        """Divide the rows that the optimizer updates."""
        stage = placement.request.worlds.mesh.zero
        placement.apply_data_parallel(partial(divide_rows, placement.model, stage=stage))


class Replication:
    """Data parallelism: every replica has all parameters, and gradients are added over the replicas."""

    name = "replicate"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether nothing is divided over the data-parallel ranks."""
        return not request.worlds.mesh.zero

    def apply(self, placement: Placement) -> None:
        """Put the reducer's hooks on the parameters."""
        placement.apply_data_parallel(replicate)


class ExpertGradients:
    """The reduction of the experts' gradients over the ranks with the same experts."""

    name = "expert gradients"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the experts are distributed."""
        return request.worlds.mesh.ep > 1

    def apply(self, placement: Placement) -> None:
        """Add the experts to what the optimizer updates, and reduce their gradients."""
        split, routed, peers = placement.partition, placement.routed, placement.request.worlds.expert_replicas
        assert split is not None
        if routed:
            placement.partition = with_experts(split, live=placement.current, peers=peers, routed=routed)


class TiedGradients:
    """The sum of the gradients of weights that several pipeline stages use."""

    name = "tied gradients"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether stages add gradients among themselves; exact mode adds them on its grid."""
        return request.worlds.mesh.pp > 1 and not request.exact

    def apply(self, placement: Placement) -> None:
        """Add the gradients of tied weights over the stages."""
        split, piped = placement.partition, placement.piped
        assert split is not None and piped is not None
        if piped.ties:
            world = placement.request.worlds.pp
            reducer = TiedReducer(split.reducer, named=split.named, ties=piped.ties, world=world)
            placement.partition = replace(split, reducer=reducer)


PARALLELISMS = (
    ParallelismEntry(TiedUseRecords(), "on the whole model: a stage sees only its own uses"),
    ParallelismEntry(TensorPlanning(), "on the whole model: the plan follows its whole forward"),
    ParallelismEntry(
        PipelineStages(),
        "before anything is split, wrapped or moved: this rank touches only what it keeps",
        layouts=("pp",),
        cost="bubble",
    ),
    ParallelismEntry(
        ExpertParallel(),
        "before tensors: an expert that went elsewhere is not cut here",
        layouts=("ep",),
        cost="experts",
    ),
    ParallelismEntry(
        TensorParallel(),
        "before remat: what is recomputed is the split layer, with its messages",
        layouts=("tp",),
        cost="tensor",
    ),
    ParallelismEntry(ContextParallelism(), "inside the layers as they are split", layouts=("cp",), cost="context"),
    ParallelismEntry(DeferredValues(), "once it is known what this rank keeps: nothing else gets memory"),
    ParallelismEntry(ListedBlocks(), "before remat and compile, which wrap them"),
    ParallelismEntry(
        ActivationCheckpointing(), "before compile: a compiled block knows what it recomputes", cost="again"
    ),
    ParallelismEntry(Compilation(), "before shard: gathering happens around a compiled block, not inside it"),
    ParallelismEntry(FixedPoint(), "before the reducers, which add on the grid"),
    ParallelismEntry(
        FullSharding(),
        "last of what changes parameters: it cuts what is left of each into rows",
        layouts=("fsdp", "hsdp"),
        cost="gather",
    ),
    ParallelismEntry(
        ShardedOptimizer(), "as shard: on what is left of each parameter", layouts=("zero1", "zero2"), cost="gradients"
    ),
    ParallelismEntry(Replication(), "hooks on the parameters as they are by now", layouts=("ddp",), cost="gradients"),
    ParallelismEntry(ExpertGradients(), "joins the reducer of the other parameters"),
    ParallelismEntry(TiedGradients(), "around all other reducers: it adds what they have reduced"),
)


def parallelize(model: nn.Module, request: PlacementRequest) -> ParallelizedModel:
    """Place a model that is whole on every rank.

    Raises:
        LayoutError: a part of the model does not support the requested layout.
    """
    placement, hooked = Placement.of_whole(model, request), hooked_in(model)
    for step in PARALLELISMS:
        if step.parallelism.is_on(request):
            step.parallelism.apply(placement)
    worlds, hollow, base, split = request.worlds, placement.hollow, placement.base, placement.partition
    assert split is not None
    kept = [kept_now(one, split.share(one.name), base) for one in placement.named]
    refuse_lost(hooked, model, without=hollow, layout=layout_label(request.asked, worlds.mesh))
    return ParallelizedModel(
        named=split.named,
        weights=ShardedTensors(
            world=worlds.all_ranks, held=[held_now(one, split, hollow) for one in placement.tensors]
        ),
        kept=ShardedTensors(world=worlds.all_ranks, held=kept),
        reducer=split.reducer,
        spread=split.spread,
        settle=split.settle,
        leaves=split.leaves,
        piped=placement.piped,
        grid=placement.grid,
        undos=placement.undos,
        context=placement.context,
        hooked=tuple(hooked),
    )


def _grid(
    every: Sequence[NamedParameter], uses: TiedUses, piped: PipelineModel | None, stages: World
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
    grid = FixedPointGrid(names=[member.name for member in every], others=[stages], uses=uses)
    if ties:
        uses.crossing = frozenset(ties)
        grid.tie(ExactTies(ties, world=stages))
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
