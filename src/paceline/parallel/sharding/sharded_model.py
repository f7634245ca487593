"""The sharded model: the shares that this rank's optimizer updates, and data for the step and the checkpoint."""

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
    """The ranks that split a batch: all of them, those that split rows, those that hold the same rows.

    `compress` is the gradient compression for ranks that hold whole parameters.
    """

    all: World
    shard: World
    replicas: World | None = None
    compress: Compression | None = None


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """The part of a sharded model that one rank has.

    `parts` gives the part of each of the model's parameters, frozen ones too, that this rank's model holds between
    two steps; `locals` are those tensors. Autograd writes to `sources`, one per share. Call `spread` after each update
    of the shares, and `settle` after `locals` were given other values on every rank.
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
    """Shard for ZeRO stage 1 or 2; the model keeps whole parameters. `whole` names those that are not cut into rows."""
    cut = cut_rows(named, places=data.shard.world_size, whole=whole)
    shares = shares_of(named, cut=cut, place=data.shard.rank, parts=parts)
    every = {name: p.detach() for name, p in model.named_parameters()}
    return Sharded(
        shares=shares,
        reducer=_reducer(stage, named, shares, cut, data, grid),
        spread=ParameterAllGather(shares, cut=cut, world=data.shard),
        settle=lambda: None,  # the values are whole, and the shares are views of them
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
    """Return specs that say that each tensor is whole."""
    return {name: ShardSpec.all_of(tensor.shape) for name, tensor in tensors.items()}
