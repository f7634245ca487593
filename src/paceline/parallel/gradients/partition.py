"""Partition a model's parameters over the data-parallel ranks, and build the reducer of their gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.parallel.compression.build_codec import build_compressed_reducer
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import BucketReducer, LocalReducer, Reducer
from paceline.parallel.gradients.combined_reducer import ComposedReducer
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs
from paceline.parallel.module_access.sharded_tensors import LocalTensor
from paceline.parallel.sharding.fsdp_options import make_full_shard_options
from paceline.parallel.sharding.fully_sharded import DeferredRows, shard_zero3
from paceline.parallel.sharding.row_shards import RowShard
from paceline.parallel.sharding.sharded_model import DataGroups, ShardedModel, shard_zero12


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A model's parameters, partitioned over the data-parallel ranks."""

    named_parameters: Sequence[NamedParameter]
    """The parameters that the optimizer updates."""
    shard_specs: Mapping[str, ShardSpec]
    """The shard specs of the parameters that this rank's model holds. A parameter without a spec is held in full."""
    tensors: Mapping[str, Tensor]
    """With a ZeRO stage, the tensors of the parameters that this rank's model holds, except experts; else empty."""
    reducer: Reducer
    sync_after_update: Callable[[], None]
    """Call it after each optimizer update."""
    sync_after_load: Callable[[], None]
    """Call it after new values were copied into the model's tensors."""
    leaf_parameters: Sequence[nn.Parameter]
    """The parameters to which autograd writes gradients."""

    def find_row_shard(self, name: str) -> NamedParameter | None:
        """Return the shard of a parameter that this rank's optimizer updates, or None."""
        return self._row_shards.get(name)

    @cached_property
    def _row_shards(self) -> Mapping[str, NamedParameter]:
        return {shard.name: shard for shard in self.named_parameters}


def build_reducer(
    named_parameters: Sequence[NamedParameter],
    world: World,
    grid: FixedPointGrid | None,
    *,
    compression: Compression | None = None,
) -> Reducer:
    """Return the reducer that sums the gradients of unsharded parameters over `world`."""
    if grid is not None:
        return ExactReducer(named_parameters=named_parameters, world=world, grid=grid)
    if compression is not None and compression.is_on and world.world_size > 1:
        return build_compressed_reducer(compression, named_parameters=named_parameters, world=world)
    return (
        LocalReducer(named_parameters=named_parameters)
        if world.world_size == 1
        else BucketReducer(named_parameters=named_parameters, world=world)
    )


@dataclass(frozen=True, kw_only=True)
class ShardingRequest:
    """The layout, groups and earlier splits that determine how parameters are partitioned over data-parallel ranks."""

    layout: Layout
    settings: PlacementSettings
    data_groups: DataGroups
    grid: FixedPointGrid | None
    base_specs: ShardSpecs
    """The shard specs after expert and tensor parallelism; empty if all parameters are full tensors."""
    absent_names: Collection[str] | None
    """The parameters of other pipeline stages; None without a pipeline."""
    expert_names: Collection[str]
    """The parameters of experts, which are not sharded here."""
    full_tensor_names: Sequence[str]
    """The parameters whose update rule needs the full tensor."""
    deferred_rows: DeferredRows | None
    """This rank's rows of parameters, if the model is on the meta device."""
    has_several_forwards: bool = False
    """True if several forwards of one microbatch run in turns, each with its own backward."""


def replicate_parameters(named_parameters: Sequence[NamedParameter], request: ShardingRequest) -> Partition:
    """Keep all parameters on each data-parallel rank, and sum their gradients over these ranks."""
    leaf_parameters = [member.parameter for member in named_parameters]
    reducer = build_reducer(
        named_parameters, request.data_groups.all_ranks, request.grid, compression=request.data_groups.compression
    )
    return Partition(
        named_parameters=named_parameters,
        shard_specs=request.base_specs,
        tensors={},
        reducer=reducer,
        sync_after_update=do_nothing,
        sync_after_load=do_nothing,
        leaf_parameters=leaf_parameters,
    )


def partition_zero12(
    model: nn.Module, named_parameters: Sequence[NamedParameter], request: ShardingRequest, *, stage: int
) -> Partition:
    """Shard the optimizer state, and at ZeRO stage 2 the gradients, over the data-parallel ranks.

    Raises:
        LayoutError: a parameter can't be sharded.
    """
    base_specs = request.base_specs or None
    return _partition(
        shard_zero12(
            stage=stage,
            model=model,
            named_parameters=named_parameters,
            data_groups=request.data_groups,
            grid=request.grid,
            base_specs=base_specs,
            full_tensor_names=request.full_tensor_names,
        )
    )


def partition_zero3(
    model: nn.Module, named_parameters: Sequence[NamedParameter], request: ShardingRequest
) -> Partition:
    """Shard parameters, gradients and optimizer state over the data-parallel ranks.

    Raises:
        LayoutError: a parameter can't be sharded.
    """
    return _partition(
        shard_zero3(
            model,
            named_parameters=named_parameters,
            data_groups=request.data_groups,
            grid=request.grid,
            base_specs=request.base_specs or None,
            options=make_full_shard_options(model, layout=request.layout, settings=request.settings),
            absent_names=request.absent_names,
            expert_names=request.expert_names,
            deferred_rows=request.deferred_rows,
            has_several_forwards=request.has_several_forwards,
        )
    )


def _partition(sharded: ShardedModel) -> Partition:
    return Partition(
        named_parameters=sharded.row_shards,
        shard_specs=sharded.shard_specs,
        tensors=sharded.local_tensors,
        reducer=sharded.reducer,
        sync_after_update=sharded.sync_after_update,
        sync_after_load=sharded.sync_after_load,
        leaf_parameters=sharded.leaf_parameters,
    )


def add_expert_parameters(
    partition: Partition,
    *,
    current_parameters: Sequence[NamedParameter],
    expert_replicas: World,
    expert_specs: ShardSpecs,
) -> Partition:
    """Add this rank's expert parameters to a partition, without sharding them over the data-parallel ranks.

    `expert_specs` are the shards of these parameters that expert parallelism has assigned to this rank.

    A rank's experts get the tokens of all ranks of its `ep` group, so their gradients already include these tokens. The
    gradients are summed only over `expert_replicas`, the ranks that hold the same experts.
    """
    expert_parameters = [member for member in current_parameters if member.name in expert_specs]
    expert_reducer = build_reducer(expert_parameters, expert_replicas, None)
    return replace(
        partition,
        named_parameters=sorted([*partition.named_parameters, *expert_parameters], key=lambda member: member.index),
        leaf_parameters=[*partition.leaf_parameters, *(member.parameter for member in expert_parameters)],
        shard_specs={**partition.shard_specs, **expert_specs},
        tensors={name: tensor for name, tensor in partition.tensors.items() if name not in expert_specs},
        reducer=ComposedReducer([partition.reducer, expert_reducer], needs_equal_microbatches=True),
    )


def model_tensor_after_placement(
    tensor: LocalTensor, partition: Partition, absent_names: Collection[str]
) -> LocalTensor:
    """Return the shard of a parameter or buffer that this rank's model holds after placement."""
    if tensor.name in absent_names:
        return replace(tensor, shard_spec=ShardSpec.empty(tensor.shard_spec.shape))
    shard_spec = partition.shard_specs.get(tensor.name)
    if shard_spec is None or tensor.is_buffer:
        return tensor
    if tensor.name not in partition.tensors:
        return replace(tensor, shard_spec=shard_spec)
    return replace(tensor, shard_spec=shard_spec, get_tensor=partial(Tensor.detach, partition.tensors[tensor.name]))


def optimizer_tensor_after_placement(
    member: NamedParameter, row_shard: NamedParameter | None, base_specs: ShardSpecs
) -> LocalTensor:
    """Return the shard of a parameter that this rank's optimizer updates; an empty one if `row_shard` is None."""
    shape, dtype = member.parameter.shape, member.parameter.dtype
    if row_shard is None:
        return LocalTensor(name=member.name, shard_spec=ShardSpec.empty(shape), dtype=dtype, get_tensor=_raise_absent)
    shard_spec = (
        row_shard.shard_spec if isinstance(row_shard, RowShard) else base_specs.get(member.name, ShardSpec.full(shape))
    )
    return LocalTensor(
        name=member.name, shard_spec=shard_spec, dtype=dtype, get_tensor=partial(Tensor.detach, row_shard.parameter)
    )


def _raise_absent() -> Tensor:
    raise AssertionError("this rank has no shard of the parameter")


def do_nothing() -> None:
    """Do nothing: some layouts need no synchronization after an update."""
