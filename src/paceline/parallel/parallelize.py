"""Transform a full model into this rank's part of it: apply the entries of `PARALLELISMS`, in that order."""

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
    """One row of `PARALLELISMS`: a transformation of the model, and the reason for its position in the order.

    `layouts` are the layouts that use only this parallelism; `cost` is the field of the planner's `StepTime` that
    counts its time. Both are empty for an entry that only supports other entries.
    """

    parallelism: Parallelism
    reason: str
    layouts: tuple[str, ...] = ()
    cost: str = ""


class TiedUseRecords:
    """A separate gradient for each use of a tied weight, as exact mode requires."""

    name = "tied uses"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether exact mode is on."""
        return request.exact

    def apply(self, placement: Placement) -> None:
        """Find all uses of each tied weight."""
        placement.uses = TiedUses(placement.model)


class TensorPlanning:
    """The tensor-parallel plan, which says how each weight is split over the `tp` ranks."""

    name = "tensor plan"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether weights are split."""
        return request.worlds.mesh.tp > 1

    def apply(self, placement: Placement) -> None:
        """Choose the plan. Expert weights are replicated over the `tp` ranks."""
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
        """Cut the model into stages, and free the memory of the other ranks' stages."""
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
    """Expert parallelism: each rank keeps some of the experts, and tokens are sent to the rank of their expert."""

    name = "experts"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the experts are distributed."""
        return request.worlds.mesh.ep > 1

    def apply(self, placement: Placement) -> None:
        """Keep this rank's experts, and route tokens to the other ranks' experts."""
        placement.experts = split_experts(model=placement.model, world=placement.request.worlds.ep)


class TensorParallel:
    """Tensor parallelism: each rank keeps a slice of each large weight."""

    name = "tensors"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether weights are split."""
        return request.worlds.mesh.tp > 1

    def apply(self, placement: Placement) -> None:
        """Split the weights as the plan says."""
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
        """Pass the context to the step, which enters it around each forward."""
        placement.context = placement.request.context


class DeferredValues:
    """The parameter values of a model that was built on the meta device."""

    name = "values"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the model's parameters are still on the meta device."""
        return request.late is not None

    def apply(self, placement: Placement) -> None:
        """Fill the parameters that this rank keeps; with full sharding, rows are created when a unit takes them."""
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
    """Activation checkpointing: blocks recompute their activations in backward."""

    name = "remat"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether activation checkpointing is on."""
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
        """Compile the blocks; report it if the pipeline stages call no block."""
        model, piped, say = placement.model, placement.piped, placement.request.say
        if not placement.blocks and piped is not None and piped.along_graph and not repeated_blocks(model):
            say("note: no block is compiled: stages along a graph call the model's modules, and none of them repeats")
        else:
            placement.undos.append(compile_blocks(model, say=say, blocks=placement.blocks))


class FixedPoint:
    """The fixed-point grid on which exact mode adds gradients."""

    name = "exact"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether exact mode is on."""
        return request.exact

    def apply(self, placement: Placement) -> None:
        """Create the grid."""
        assert placement.uses is not None
        placement.grid = _grid(placement.named, placement.uses, placement.piped, placement.request.worlds.pp)


class FullSharding:
    """ZeRO stage 3: parameters, gradients and optimizer state are sharded; units are gathered when they run."""

    name = "shard"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether parameters are sharded."""
        return request.worlds.mesh.zero == 3

    def apply(self, placement: Placement) -> None:
        """Shard each parameter by rows."""
        placement.apply_data_parallel(partial(divide_fully, placement.model))


class ShardedOptimizer:
    """ZeRO stages 1 and 2: the optimizer state, and at stage 2 the gradients, are sharded."""

    name = "shard optimizer"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the optimizer state is sharded, but parameters are not."""
        return request.worlds.mesh.zero in (1, 2)

    def apply(self, placement: Placement) -> None:
        """Assign to each rank the rows that its optimizer updates."""
        stage = placement.request.worlds.mesh.zero
        placement.apply_data_parallel(partial(divide_rows, placement.model, stage=stage))


class Replication:
    """Data parallelism: every replica has all parameters, and gradients are all-reduced over the replicas."""

    name = "replicate"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether nothing is sharded over the data-parallel ranks."""
        return not request.worlds.mesh.zero

    def apply(self, placement: Placement) -> None:
        """Register the gradient reducer's hooks on the parameters."""
        placement.apply_data_parallel(replicate)


class ExpertGradients:
    """The reduction of the experts' gradients over the ranks that hold the same experts."""

    name = "expert gradients"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the experts are distributed."""
        return request.worlds.mesh.ep > 1

    def apply(self, placement: Placement) -> None:
        """Add the experts to the optimizer's parameters, and reduce their gradients."""
        split, routed, peers = placement.partition, placement.routed, placement.request.worlds.expert_replicas
        assert split is not None
        if routed:
            placement.partition = with_experts(split, live=placement.current, peers=peers, routed=routed)


class TiedGradients:
    """The sum of the gradients of weights that several pipeline stages use."""

    name = "tied gradients"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the stages sum gradients in floating point; exact mode sums them on its grid."""
        return request.worlds.mesh.pp > 1 and not request.exact

    def apply(self, placement: Placement) -> None:
        """Sum the gradients of tied weights over the stages."""
        split, piped = placement.partition, placement.piped
        assert split is not None and piped is not None
        if piped.ties:
            world = placement.request.worlds.pp
            reducer = TiedReducer(split.reducer, named=split.named, ties=piped.ties, world=world)
            placement.partition = replace(split, reducer=reducer)


PARALLELISMS = (
    ParallelismEntry(TiedUseRecords(), "on the full model: a stage sees only its own uses"),
    ParallelismEntry(TensorPlanning(), "on the full model: the plan is derived from its full forward"),
    ParallelismEntry(
        PipelineStages(),
        "before anything is split, wrapped or moved: the later entries process only this rank's stages",
        layouts=("pp",),
        cost="bubble",
    ),
    ParallelismEntry(
        ExpertParallel(),
        "before tensors: only the experts of this rank are split",
        layouts=("ep",),
        cost="experts",
    ),
    ParallelismEntry(
        TensorParallel(),
        "before remat: backward recomputes the split layer, with its collectives",
        layouts=("tp",),
        cost="tensor",
    ),
    ParallelismEntry(
        ContextParallelism(), "after tensors: it runs inside the split layers", layouts=("cp",), cost="context"
    ),
    ParallelismEntry(DeferredValues(), "after all splits: only the tensors that this rank keeps get memory"),
    ParallelismEntry(ListedBlocks(), "before remat and compile, which wrap them"),
    ParallelismEntry(
        ActivationCheckpointing(), "before compile: the checkpointed forward is the one to compile", cost="again"
    ),
    ParallelismEntry(Compilation(), "before shard: parameters are gathered around a compiled block, not inside it"),
    ParallelismEntry(FixedPoint(), "before the reducers, which add on the grid"),
    ParallelismEntry(
        FullSharding(),
        "after all other changes of parameters: it shards this rank's part of each parameter by rows",
        layouts=("fsdp", "hsdp"),
        cost="gather",
    ),
    ParallelismEntry(
        ShardedOptimizer(),
        "like shard, after all other changes of parameters",
        layouts=("zero1", "zero2"),
        cost="gradients",
    ),
    ParallelismEntry(
        Replication(),
        "after all changes of parameters, on which it registers hooks",
        layouts=("ddp",),
        cost="gradients",
    ),
    ParallelismEntry(ExpertGradients(), "after the reducer of the other parameters, which it extends"),
    ParallelismEntry(TiedGradients(), "around all other reducers: it sums the gradients that they have reduced"),
)


def parallelize(model: nn.Module, request: PlacementRequest) -> ParallelizedModel:
    """Apply the requested parallelisms to a full model, which every rank holds.

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
    """Return the fixed-point grid of exact mode, and separate the gradients of each tied weight by use.

    The gradients are separated in one process too, so that it adds the same terms as pipeline stages.

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
    """Return the model of a replica that runs in a thread; its gradients are added to those of the first replica."""
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
