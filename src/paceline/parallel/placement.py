"""Hold the state of a model while parallelisms are applied to it, and define the interface of a parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.config.compression import Compression
from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.context_parallel.exact_context import ExactContextParallel
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.expert_parallel.expert_parallel import ShardedExperts
from paceline.parallel.gradients.partition import Partition, ShardingRequest
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.module_access.blocks import Block
from paceline.parallel.module_access.parameters import NamedParameter, trainable_parameters
from paceline.parallel.module_access.shard_spec import ShardSpecs
from paceline.parallel.module_access.sharded_tensors import LocalTensor, ShardedTensors, model_tensors
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.parallel.sharding.fully_sharded import DeferredRows
from paceline.parallel.sharding.sharded_model import DataGroups
from paceline.parallel.tensor_parallel.tensor_parallel import TensorParallelPlacement
from paceline.parallel.tensor_parallel.tensor_plan import TensorPlan
from paceline.parallel.trace_example_forward import ExampleRun


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """The layout and the options for `parallelize`."""

    layout: Layout
    worlds: MeshGroups
    example_run: ExampleRun | None
    """Forward and loss on one microbatch; pipeline parallelism needs it."""
    report: Callable[[str], None]
    """A function that prints a message for the user."""
    settings: PlacementSettings = field(default_factory=PlacementSettings)
    exact: bool = False
    tensor_shards: int | None = None
    """The number of logical shards of each weight that tensor parallelism splits, in exact mode."""
    is_compiled: bool = False
    full_tensor_names: Sequence[str] = ()
    """The parameters whose update rule needs the full tensor."""
    context_parallel: ContextParallel | ExactContextParallel | None = None
    deferred_rows: DeferredRows | None = None
    """This rank's rows of the parameters, if the model is on the meta device."""
    deferred_model: DeferredModel | None = None
    """The source of the values, if the model is on the meta device."""
    compression: Compression | None = None


@dataclass(kw_only=True)
class Placement:
    """The state of placement: each parallelism changes the model in place, and stores here what later ones need.

    `tensors` are the parameters and buffers of the full model, `named_parameters` its trainable parameters.
    `current_parameters` are this rank's trainable parameters before they are sharded over the data-parallel ranks.
    """

    model: nn.Module
    request: PlacementRequest
    tensors: Sequence[LocalTensor]
    named_parameters: Sequence[NamedParameter]
    tied_uses: TiedUses | None = None
    tensor_plan: TensorPlan | None = None
    pipeline_model: PipelineModel | None = None
    placed_experts: ShardedExperts | None = None
    tensor_placement: TensorParallelPlacement | None = None
    deferred_rows: DeferredRows | None = None
    blocks: Sequence[Block] | None = None
    context_parallel: ContextParallel | ExactContextParallel | None = None
    grid: FixedPointGrid | None = None
    current_parameters: Sequence[NamedParameter] = ()
    partition: Partition | None = None
    undos: list[Callable[[], None]] = field(default_factory=list)

    @staticmethod
    def from_full_model(model: nn.Module, request: PlacementRequest) -> "Placement":
        """Return the initial state, in which every rank holds the full model."""
        tensors, named_parameters = model_tensors(model), trainable_parameters(model)
        return Placement(
            model=model,
            request=request,
            tensors=tensors,
            named_parameters=named_parameters,
            deferred_rows=request.deferred_rows,
        )

    @property
    def expert_specs(self) -> ShardSpecs:
        """The shard specs of the experts' parameters on this rank."""
        return {} if self.placed_experts is None else self.placed_experts.shard_specs

    @property
    def base_specs(self) -> ShardSpecs:
        """The shard spec of each parameter after expert and tensor parallelism; empty if all are full tensors."""
        if self.placed_experts is None and self.tensor_placement is None:
            return {}
        full_specs = {tensor.name: tensor.shard_spec for tensor in self.tensors if not tensor.is_buffer}
        return {
            **full_specs,
            **({} if self.tensor_placement is None else self.tensor_placement.shard_specs),
            **self.expert_specs,
        }

    @property
    def absent_names(self) -> frozenset[str]:
        """The names of the parameters and buffers that only other ranks hold."""
        pipeline_absent_names = frozenset[str]() if self.pipeline_model is None else self.pipeline_model.absent_names
        return pipeline_absent_names | {name for name, part in self.expert_specs.items() if part.local_shape is None}

    def sharding_request(self) -> ShardingRequest:
        """Return the input of the partition over the data-parallel ranks."""
        request, worlds = self.request, self.request.worlds
        return ShardingRequest(
            layout=request.layout,
            settings=request.settings,
            data_groups=DataGroups(
                all_ranks=worlds.summed,
                shard_world=worlds.shard,
                replica_world=worlds.shard_replicas,
                compression=request.compression,
            ),
            grid=self.grid,
            base_specs=self.base_specs,
            absent_names=None if self.pipeline_model is None else self.pipeline_model.absent_names,
            expert_names=self.expert_specs,
            full_tensor_names=request.full_tensor_names,
            deferred_rows=self.deferred_rows,
            has_several_forwards=self.num_sequence_shards > 1,
        )

    @property
    def num_sequence_shards(self) -> int:
        """The number of sequence shards that this rank computes under exact context parallelism, or else 1."""
        context = self.request.context_parallel
        return len(context.shard_numbers) if isinstance(context, ExactContextParallel) else 1

    def apply_data_parallel(
        self, partition_parameters: Callable[[Sequence[NamedParameter], ShardingRequest], Partition]
    ) -> None:
        """Partition this rank's parameters over the data-parallel ranks; expert parameters are not sharded."""
        parameters, absent_names = dict(self.model.named_parameters()), self.absent_names
        self.current_parameters = [
            replace(member, parameter=parameters[member.name])
            for member in self.named_parameters
            if member.name not in absent_names
        ]
        expert_specs = self.expert_specs
        sharded_parameters = [member for member in self.current_parameters if member.name not in expert_specs]
        self.partition = partition_parameters(sharded_parameters, self.sharding_request())


@dataclass(frozen=True, kw_only=True)
class ParallelizedModel:
    """This rank's part of a model after all parallelisms are applied."""

    named_parameters: Sequence[NamedParameter]
    """The parameters that the optimizer updates."""
    weights: ShardedTensors
    """The parameters and buffers of all ranks' models."""
    optim_shards: ShardedTensors
    """The shards of parameters that all ranks' optimizers update."""
    reducer: Reducer
    sync_after_update: Callable[[], None]
    """Call it after each optimizer update."""
    sync_after_load: Callable[[], None]
    """Call it after new values were copied into the model's tensors."""
    leaf_parameters: Sequence[nn.Parameter] = ()
    """The parameters to which autograd writes gradients."""
    pipeline_model: PipelineModel | None = None
    grid: FixedPointGrid | None = None
    """The fixed-point grid of exact mode; None without it."""
    undos: Sequence[Callable[[], None]] = ()
    """Functions that remove what the parallelisms have installed."""
    context_parallel: ContextParallel | ExactContextParallel | None = None
    hooked_names: tuple[str, ...] = ()
    """The parameters on which the user registered hooks."""

    def owned_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this rank updates.

        With optimizer shards, one of the ranks that hold a parameter updates it. Otherwise every rank updates all of
        its parameters.
        """
        is_unsharded = self.optim_shards.is_unsharded
        return [
            member.parameter for member in self.named_parameters if is_unsharded or self.optim_shards.owns(member.name)
        ]

    def close(self) -> None:
        """Remove the wrappers around the model's modules, in reverse order."""
        for undo in reversed(self.undos):
            undo()


class Parallelism(Protocol):
    """One transformation of a model, such as tensor parallelism or activation checkpointing."""

    @property
    def name(self) -> str:
        """Return a short name of the transformation."""

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether the request needs this transformation."""

    def apply(self, placement: Placement) -> None:
        """Transform the model in place, and store in `placement` what later transformations need.

        Raises:
            LayoutError: a part of the model does not support the transformation.
        """
