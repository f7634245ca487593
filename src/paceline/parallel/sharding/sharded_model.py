"""A model sharded by ZeRO: the row shards that this rank's optimizer updates, their reducer and their shard specs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import BucketReducer, LocalReducer, Reducer
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs
from paceline.parallel.sharding.reduce_scatter_gradients import ScatterReducer
from paceline.parallel.sharding.row_shards import RowShard, RowSplit, make_row_shards, make_row_splits
from paceline.parallel.sharding.zero1_zero2_reducers import ParameterAllGather, RowShardReducer


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """The data-parallel groups of this rank.

    The batch is split over `all_ranks`, and the rows of parameters over `shard_world`. The ranks of `replica_world`
    hold the same rows. `compression` is the gradient compression, which unsharded parameters use.
    """

    all_ranks: World
    shard_world: World
    replica_world: World | None = None
    compression: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """This rank's part of a model sharded by ZeRO stage 1, 2 or 3."""

    row_shards: Sequence[RowShard]
    """The shards that the optimizer updates."""
    reducer: Reducer
    sync_after_update: Callable[[], None]
    """Call it after each update of the row shards."""
    sync_after_load: Callable[[], None]
    """Call it after new values were copied into `local_tensors` on all ranks."""
    shard_specs: ShardSpecs
    """The shard spec of each parameter that this rank's model holds between two steps, trainable or frozen."""
    local_tensors: Mapping[str, Tensor]
    """The local tensor of each of these parameters."""
    leaf_parameters: Sequence[nn.Parameter]
    """The parameters to which autograd writes gradients, one per row shard."""
    data_groups: DataGroups

    @property
    def needs_equal_microbatches(self) -> bool:
        """Return whether every rank must run forward and backward equally often."""
        return bool(getattr(self.reducer, "needs_equal_microbatches", False))


def shard_zero12(
    *,
    stage: int,
    model: nn.Module,
    named_parameters: Sequence[NamedParameter],
    data_groups: DataGroups,
    grid: FixedPointGrid | None = None,
    base_specs: ShardSpecs | None = None,
    full_tensor_names: Sequence[str] = (),
) -> ShardedModel:
    """Shard for ZeRO stage 1 or 2: the model keeps full parameters.

    A parameter in `full_tensor_names` is updated by one rank, which has all its rows.
    """
    row_splits = make_row_splits(
        named_parameters, num_shards=data_groups.shard_world.world_size, full_tensor_names=full_tensor_names
    )
    row_shards = make_row_shards(
        named_parameters, row_splits=row_splits, shard_rank=data_groups.shard_world.rank, base_specs=base_specs
    )
    full_parameters = {name: p.detach() for name, p in model.named_parameters()}
    return ShardedModel(
        row_shards=row_shards,
        reducer=_build_reducer(stage, named_parameters, row_shards, row_splits, data_groups, grid),
        sync_after_update=ParameterAllGather(row_shards, row_splits=row_splits, world=data_groups.shard_world),
        sync_after_load=lambda: None,  # the row shards are views of the model's full parameters
        shard_specs=base_specs or make_full_specs(full_parameters),
        local_tensors=full_parameters,
        leaf_parameters=[row_shard.model_parameter for row_shard in row_shards],
        data_groups=data_groups,
    )


def _build_reducer(
    stage: int,
    named_parameters: Sequence[NamedParameter],
    row_shards: Sequence[RowShard],
    row_splits: Mapping[str, RowSplit],
    data_groups: DataGroups,
    grid: FixedPointGrid | None,
) -> Reducer:
    if stage == 2:
        leaf_parameters = [row_shard.model_parameter for row_shard in row_shards]
        return ScatterReducer(
            row_shards=row_shards,
            leaf_parameters=leaf_parameters,
            row_splits=row_splits,
            shard_world=data_groups.shard_world,
            replica_world=data_groups.replica_world,
            grid=grid,
        )
    inner: Reducer
    if grid is not None:
        inner = ExactReducer(named_parameters=named_parameters, world=data_groups.all_ranks, grid=grid)
    elif data_groups.all_ranks.world_size > 1:
        inner = BucketReducer(named_parameters=named_parameters, world=data_groups.all_ranks)
    else:
        inner = LocalReducer(named_parameters=named_parameters)
    return RowShardReducer(inner, row_shards=row_shards, row_splits=row_splits, shard_rank=data_groups.shard_world.rank)


def make_full_specs(tensors: Mapping[str, Tensor]) -> ShardSpecs:
    """Return the shard specs of full tensors."""
    return {name: ShardSpec.full(tensor.shape) for name, tensor in tensors.items()}
