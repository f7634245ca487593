"""A model sharded by ZeRO: the row shards that this rank's optimizer updates, their reducer and their shard specs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import BucketReducer, LocalReducer, Reducer
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec
from paceline.parallel.sharding.reduce_scatter import ScatterReducer
from paceline.parallel.sharding.row_shards import RowShard, RowSplit, cut_rows, shares_of
from paceline.parallel.sharding.zero1_zero2_reducers import ParameterAllGather, RowsReducer


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """The data-parallel groups of this rank.

    `all_ranks` split the batch, `shard_world` splits the rows of parameters, and the ranks of `replica_world` hold the
    same rows. `compression` is the gradient compression for ranks with unsharded parameters.
    """

    all: World
    shard: World
    replicas: World | None = None
    compress: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """This rank's part of a model sharded by ZeRO stage 1, 2 or 3.

    `shard_specs` and `local_tensors` describe each parameter, trainable or frozen, as this rank's model holds it
    between two steps. Autograd writes to `leaf_parameters`, one per row shard. Call `sync_after_update` after each
    update of the row shards, and `sync_after_load` after new values were copied into `local_tensors` on all ranks.
    """

    shares: Sequence[RowShard]
    reducer: Reducer
    spread: Callable[[], None]
    settle: Callable[[], None]
    parts: Parts
    locals: Mapping[str, Tensor]
    sources: Sequence[nn.Parameter]
    data: DataGroups

    @property
    def needs_equal_microbatches(self) -> bool:
        """Return whether every rank must run forward and backward equally often."""
        return bool(getattr(self.reducer, "needs_equal_microbatches", False))


def shard_zero12(
    *,
    stage: int,
    model: nn.Module,
    named: Sequence[NamedParameter],
    data: DataGroups,
    grid: FixedPointGrid | None = None,
    parts: Parts | None = None,
    whole: Sequence[str] = (),
) -> Sharded:
    """Shard for ZeRO stage 1 or 2: the model keeps full parameters. One rank each updates `full_tensor_names`."""
    cut = cut_rows(named, places=data.shard.world_size, whole=whole)
    shares = shares_of(named, cut=cut, place=data.shard.rank, parts=parts)
    every = {name: p.detach() for name, p in model.named_parameters()}
    return Sharded(
        shares=shares,
        reducer=_reducer(stage, named, shares, cut, data, grid),
        spread=ParameterAllGather(shares, cut=cut, world=data.shard),
        settle=lambda: None,  # the row shards are views of the model's full parameters
        parts=parts or whole_parts(every),
        locals=every,
        sources=[share.holder for share in shares],
        data=data,
    )


def _reducer(
    stage: int,
    named: Sequence[NamedParameter],
    shares: Sequence[RowShard],
    cut: Mapping[str, RowSplit],
    data: DataGroups,
    grid: FixedPointGrid | None,
) -> Reducer:
    if stage == 2:
        sources = [share.holder for share in shares]
        return ScatterReducer(
            shares=shares, sources=sources, cut=cut, shard=data.shard, replicas=data.replicas, grid=grid
        )
    inner: Reducer
    if grid is not None:
        inner = ExactReducer(named=named, world=data.all, grid=grid)
    elif data.all.world_size > 1:
        inner = BucketReducer(named=named, world=data.all)
    else:
        inner = LocalReducer(named=named)
    return RowsReducer(inner, shares=shares, cut=cut, place=data.shard.rank)


def whole_parts(tensors: Mapping[str, Tensor]) -> Parts:
    """Return the shard specs of full tensors."""
    return {name: ShardSpec.all_of(tensor.shape) for name, tensor in tensors.items()}
