"""Transform a full model into this rank's part of it: apply the entries of `PARALLELISMS`, in that order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.config.activation_checkpointing import parse_remat
from paceline.errors import LayoutError
from paceline.parallel.activation_checkpointing.checkpointing import apply_remat, repeated_blocks
from paceline.parallel.compile import compile_blocks
from paceline.parallel.context_parallel.exact_context import ExactContextParallel
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.expert_parallel.discovery import find_experts
from paceline.parallel.expert_parallel.expert_parallel import split_experts
from paceline.parallel.gradients.partition import (
    add_expert_parameters,
    model_tensor_after_placement,
    optimizer_tensor_after_placement,
    partition_zero3,
    partition_zero12,
    replicate_parameters,
)
from paceline.parallel.gradients.tied_parameters import ExactTies, TiedReducer
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.module_access.blocks import find_blocks
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.parallel.module_access.user_hooks import find_hooked_parameters, refuse_lost_hooks
from paceline.parallel.pipeline.pipeline_model import PipelineModel, build_pipeline_model
from paceline.parallel.placement import Parallelism, ParallelizedModel, Placement, PlacementRequest
from paceline.parallel.tensor_parallel.logical.logical_group import explain_logical_shards
from paceline.parallel.tensor_parallel.tensor_parallel import split_model
from paceline.parallel.tensor_parallel.tensor_plan import name_pattern
from paceline.parallel.trace_example_forward import choose_tensor_plan, make_block_timer
from paceline.planner.layout.mesh import layout_label


@dataclass(frozen=True)
class ParallelismEntry:
    """One row of `PARALLELISMS`: a transformation of the model, and the reason for its position in the order.

    `layouts` are the layouts that use only this parallelism. `cost` is the field of the planner's `StepTime` for the
    time of this parallelism. Both are empty for an entry that only supports other entries.
    """

    parallelism: Parallelism
    reason: str
    layouts: tuple[str, ...] = ()
    cost: str = ""


class TiedUseRecords:
    """Records of the gradient of each use of a tied weight, as exact mode requires."""

    name = "tied uses"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether exact mode is on."""
        return request.exact

    def apply(self, placement: Placement) -> None:
        """Find all uses of each tied weight."""
        placement.tied_uses = TiedUses(placement.model)


class TensorPlanning:
    """The tensor-parallel plan, which says how each weight is split over the `tp` ranks."""

    name = "tensor plan"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether weights are split, over ranks or into logical shards."""
        return request.worlds.mesh.tp > 1 or request.tensor_shards is not None

    def apply(self, placement: Placement) -> None:
        """Choose the plan; it does not split the weights of experts that are distributed over `ep` ranks."""
        request, mesh, settings = placement.request, placement.request.worlds.mesh, placement.request.settings
        if mesh.ep > 1:
            experts = (name_pattern(block.name) for block in find_experts(placement.model))
            settings = replace(settings, replicate=(*settings.replicate, *experts))
        num_shards = request.tensor_shards or mesh.tp
        with explain_logical_shards(request.tensor_shards):
            placement.tensor_plan = choose_tensor_plan(
                placement.model, settings, num_shards, request.example_run, request.deferred_model
            )


class PipelineStages:
    """Pipeline parallelism: this rank keeps its stages of the model."""

    name = "stages"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether there are several stages."""
        return request.worlds.mesh.pp > 1

    def apply(self, placement: Placement) -> None:
        """Cut the model into stages, and free the memory of the other ranks' stages."""
        request, worlds = placement.request, placement.request.worlds
        assert request.example_run is not None
        has_shards = isinstance(request.context_parallel, ExactContextParallel)
        has_remat = parse_remat(request.layout.remat).is_on
        placement.pipeline_model = build_pipeline_model(
            placement.model,
            layout=request.layout,
            mesh=worlds.mesh,
            world=worlds.pp,
            call=request.example_run,
            settings=request.settings,
            report=request.report,
            can_split_backward=not (worlds.mesh.zero == 3 or has_remat or request.is_compiled or has_shards),
            has_sequence_shards=has_shards,
            time_modules=make_block_timer(
                placement.model, request.settings, worlds.all_ranks, request.example_run, request.deferred_model
            ),
            deferred_model=request.deferred_model,
        )


class ExpertParallel:
    """Expert parallelism: each rank keeps some of the experts, and tokens are sent to the ranks of their experts."""

    name = "experts"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the experts are distributed."""
        return request.worlds.mesh.ep > 1

    def apply(self, placement: Placement) -> None:
        """Keep this rank's experts, and route tokens to the other ranks' experts."""
        placement.placed_experts = split_experts(model=placement.model, world=placement.request.worlds.ep)


class TensorParallel:
    """Tensor parallelism: each rank keeps a slice of each large weight."""

    name = "tensors"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether weights are split, over ranks or into logical shards."""
        return request.worlds.mesh.tp > 1 or request.tensor_shards is not None

    def apply(self, placement: Placement) -> None:
        """Split the weights as the plan says."""
        request, plan = placement.request, placement.tensor_plan
        assert plan is not None
        split = split_model(
            placement.model, plan=plan, world=request.worlds.tp, sequence=request.layout.sequence,
            logical_shards=request.tensor_shards,
        )  # fmt: skip
        if placement.pipeline_model is not None:
            placement.pipeline_model.stages.on_forward_end.append(split.restore_parameters)
        placement.tensor_placement = split


class ContextParallelism:
    """Context parallelism: sequences are sharded, and attention runs over the `cp` ranks."""

    name = "context"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether sequences are sharded."""
        return request.context_parallel is not None

    def apply(self, placement: Placement) -> None:
        """Store the `ContextParallel` object, which the training step uses around each forward."""
        placement.context_parallel = placement.request.context_parallel


class DeferredValues:
    """The parameter values of a model that was built on the meta device."""

    name = "values"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the model's parameters are still on the meta device."""
        return request.deferred_model is not None

    def apply(self, placement: Placement) -> None:
        """Fill the parameters that this rank keeps; with full sharding, prepare their rows, which are filled later."""
        deferred_model, worlds = placement.request.deferred_model, placement.request.worlds
        assert deferred_model is not None
        shard = worlds.shard if worlds.mesh.zero == 3 and worlds.shard.world_size > 1 else None
        placement.deferred_rows = deferred_model.fill(
            placement.model, base_specs=placement.base_specs, absent_names=placement.absent_names,
            expert_names=placement.expert_specs, shard_world=shard,
        )  # fmt: skip


class ListedBlocks:
    """The blocks that the user lists with `place.blocks`."""

    name = "listed blocks"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether blocks are listed."""
        return bool(request.settings.blocks)

    def apply(self, placement: Placement) -> None:
        """Find the blocks."""
        placement.blocks = find_blocks(placement.model, listed_names=placement.request.settings.blocks)


class ActivationCheckpointing:
    """Activation checkpointing: blocks recompute their activations in backward."""

    name = "remat"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether activation checkpointing is on."""
        return parse_remat(request.layout.remat).is_on

    def apply(self, placement: Placement) -> None:
        """Wrap the blocks."""
        policy = parse_remat(placement.request.layout.remat)
        placement.undos.append(apply_remat(placement.model, policy=policy, blocks=placement.blocks))


class Compilation:
    """Blocks that `torch.compile` compiles."""

    name = "compile"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether blocks are compiled."""
        return request.is_compiled

    def apply(self, placement: Placement) -> None:
        """Compile the blocks; without blocks, compile the model's forward, or report why that is not possible."""
        model, pipeline, report = placement.model, placement.pipeline_model, placement.request.report
        if not placement.blocks and pipeline is not None and pipeline.is_graph_split and not repeated_blocks(model):
            report(
                "note: no block is compiled: the model has no repeated blocks, and its stages run parts of an exported "
                "graph instead of its forward"
            )
        else:
            placement.undos.append(compile_blocks(model, report=report, blocks=placement.blocks))


class FixedPoint:
    """The fixed-point grid on which exact mode adds gradients."""

    name = "exact"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether exact mode is on."""
        return request.exact

    def apply(self, placement: Placement) -> None:
        """Create the grid."""
        assert placement.tied_uses is not None
        placement.grid = build_fixed_point_grid(
            placement.named_parameters, placement.tied_uses, placement.pipeline_model, placement.request.worlds,
            num_backwards=placement.num_sequence_shards,
        )  # fmt: skip


class FullSharding:
    """ZeRO stage 3: parameters, gradients and optimizer state are sharded; units are gathered when they run."""

    name = "shard"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether parameters are sharded."""
        return request.worlds.mesh.zero == 3

    def apply(self, placement: Placement) -> None:
        """Shard each parameter by rows."""
        placement.apply_data_parallel(partial(partition_zero3, placement.model))


class ShardedOptimizer:
    """ZeRO stages 1 and 2: the optimizer state, and at stage 2 the gradients, are sharded."""

    name = "shard optimizer"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the optimizer state is sharded, but parameters are not."""
        return request.worlds.mesh.zero in (1, 2)

    def apply(self, placement: Placement) -> None:
        """Assign to each rank the rows that its optimizer updates."""
        stage = placement.request.worlds.mesh.zero
        placement.apply_data_parallel(partial(partition_zero12, placement.model, stage=stage))


class Replication:
    """Data parallelism: every replica has all parameters, and gradients are all-reduced over the replicas."""

    name = "replicate"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether nothing is sharded over the data-parallel ranks."""
        return not request.worlds.mesh.zero

    def apply(self, placement: Placement) -> None:
        """Register the gradient reducer's hooks on the parameters."""
        placement.apply_data_parallel(replicate_parameters)


class ExpertGradients:
    """The reduction of the experts' gradients over the ranks that hold the same experts."""

    name = "expert gradients"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the experts are distributed."""
        return request.worlds.mesh.ep > 1

    def apply(self, placement: Placement) -> None:
        """Add the experts to the optimizer's parameters, and reduce their gradients."""
        partition, specs, peers = placement.partition, placement.expert_specs, placement.request.worlds.expert_replicas
        assert partition is not None
        if specs:
            placement.partition = add_expert_parameters(
                partition, current_parameters=placement.current_parameters, expert_replicas=peers, expert_specs=specs
            )


class TiedGradients:
    """The sum of the gradients of weights that several pipeline stages use."""

    name = "tied gradients"

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the stages sum gradients in floating point; exact mode sums them on its grid."""
        return request.worlds.mesh.pp > 1 and not request.exact

    def apply(self, placement: Placement) -> None:
        """Sum the gradients of tied weights over the stages."""
        partition, pipeline = placement.partition, placement.pipeline_model
        assert partition is not None and pipeline is not None
        if pipeline.ties:
            world = placement.request.worlds.pp
            reducer = TiedReducer(
                partition.reducer, named_parameters=partition.named_parameters, ties=pipeline.ties, world=world
            )
            placement.partition = replace(partition, reducer=reducer)


PARALLELISMS = (
    ParallelismEntry(TiedUseRecords(), "on the full model: a stage sees only its own uses"),
    ParallelismEntry(TensorPlanning(), "on the full model: the plan is derived from its full forward"),
    ParallelismEntry(
        PipelineStages(), "before the next parts, which process only this rank's stages", layouts=("pp",), cost="bubble"
    ),
    ParallelismEntry(
        ExpertParallel(),
        "before tensor parallelism, which splits all weights except those of experts",
        layouts=("ep",),
        cost="experts",
    ),
    ParallelismEntry(
        TensorParallel(), "before remat: backward recomputes the split layer", layouts=("tp",), cost="tensor"
    ),
    ParallelismEntry(
        ContextParallelism(),
        "after tensor parallelism: ring attention runs inside the layers that are split",
        layouts=("cp",),
        cost="context",
    ),
    ParallelismEntry(DeferredValues(), "after all splits: only the tensors that this rank keeps get memory"),
    ParallelismEntry(ListedBlocks(), "before remat and compile, which wrap the blocks that place.blocks lists"),
    ParallelismEntry(
        ActivationCheckpointing(), "before compile: the checkpointed forward is the one to compile", cost="again"
    ),
    ParallelismEntry(Compilation(), "before shard: parameters are gathered around a compiled block, not inside it"),
    ParallelismEntry(FixedPoint(), "before the reducers, which need its fixed-point grid to sum gradients as integers"),
    ParallelismEntry(FullSharding(), "after all other changes of parameters", layouts=("fsdp", "hsdp"), cost="gather"),
    ParallelismEntry(
        ShardedOptimizer(), "after all changes of parameters", layouts=("zero1", "zero2"), cost="gradients"
    ),
    ParallelismEntry(
        Replication(), "after all changes of parameters, since it adds hooks", layouts=("ddp",), cost="gradients"
    ),
    ParallelismEntry(ExpertGradients(), "after the reducer of the other parameters, which it extends"),
    ParallelismEntry(TiedGradients(), "around all other reducers: it sums the gradients that they have reduced"),
)


def parallelize(model: nn.Module, request: PlacementRequest) -> ParallelizedModel:
    """Apply the requested parallelisms to a full model, which every rank holds.

    Raises:
        LayoutError: a part of the model does not support the requested layout.
    """
    placement, hooked = Placement.from_full_model(model, request), find_hooked_parameters(model)
    for entry in PARALLELISMS:
        if entry.parallelism.is_on(request):
            entry.parallelism.apply(placement)
    worlds, absent, base, partition = request.worlds, placement.absent_names, placement.base_specs, placement.partition
    assert partition is not None
    optim_shards = [
        optimizer_tensor_after_placement(member, partition.find_row_shard(member.name), base)
        for member in placement.named_parameters
    ]
    refuse_lost_hooks(hooked, model, absent_names=absent, layout=layout_label(request.layout, worlds.mesh))
    return ParallelizedModel(
        named_parameters=partition.named_parameters,
        weights=ShardedTensors(
            world=worlds.all_ranks,
            tensors=[model_tensor_after_placement(tensor, partition, absent) for tensor in placement.tensors],
        ),
        optim_shards=ShardedTensors(world=worlds.all_ranks, tensors=optim_shards),
        reducer=partition.reducer,
        sync_after_update=partition.sync_after_update,
        sync_after_load=partition.sync_after_load,
        leaf_parameters=partition.leaf_parameters,
        pipeline_model=placement.pipeline_model,
        grid=placement.grid,
        undos=placement.undos,
        context_parallel=placement.context_parallel,
        hooked_names=tuple(hooked),
    )


def build_fixed_point_grid(
    members: Sequence[NamedParameter],
    tied_uses: TiedUses,
    pipeline_model: PipelineModel | None,
    worlds: MeshGroups,
    *,
    num_backwards: int = 1,
) -> FixedPointGrid:
    """Return the fixed-point grid of exact mode, and separate the gradients of each tied weight by use.

    Raises:
        LayoutError: several stages use a weight under one module name, so its uses can't be distinguished.
    """
    ties = {} if pipeline_model is None else pipeline_model.ties
    for name in sorted(set(ties) - tied_uses.names):
        raise LayoutError(
            f"exact mode with pp: {name} is used on the stages of ranks {', '.join(map(str, ties[name]))} by one name.",
            cause="one process adds the gradients of all uses of this weight, then rounds the sum to the grid; stages "
            "round the gradients of their uses, then add them",
            hint="a separate module for each use, with the weight tied (head.weight = embed.weight); "
            "or leave --train.exact out",
        )
    grid = FixedPointGrid(
        names=[m.name for m in members], extra_worlds=[worlds.pp, worlds.tp],
        tied_uses=tied_uses, num_backwards=num_backwards,
    )  # fmt: skip
    if ties:
        tied_uses.multi_stage_names = frozenset(ties)
        grid.set_ties(ExactTies(ties, world=worlds.pp))
    tied_uses.register_hooks()
    return grid
