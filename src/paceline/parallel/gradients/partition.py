"""Partition of a model's parameters over the data-parallel ranks, and the reducer of their gradients."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.parallel.compression.build_codec import compressed_reducer
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import BucketReducer, LocalReducer, Reducer
from paceline.parallel.gradients.combined_reducer import ComposedReducer
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec
from paceline.parallel.module_access.sharded_tensors import LocalTensor
from paceline.parallel.sharding.fsdp_options import fsdp_options
from paceline.parallel.sharding.fully_sharded import DeferredRows, shard_fully
from paceline.parallel.sharding.row_shards import RowShard
from paceline.parallel.sharding.sharded_model import DataGroups, Sharded, shard_zero12


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A model's parameters, partitioned over the data-parallel ranks.

    The optimizer updates `named_parameters`. `shard_specs` and `tensors` describe this rank's shard of each sharded
    parameter of the model. Call `sync_after_update` after an optimizer update, and `sync_after_load` after new values
    were copied into the model's tensors.
    """

    named: Sequence[NamedParameter]
    parts: Mapping[str, ShardSpec]
    tensors: Mapping[str, Tensor]
    reducer: Reducer
    spread: Callable[[], None]
    settle: Callable[[], None]
    leaves: Sequence[nn.Parameter]

    def share(self, name: str) -> NamedParameter | None:
        """Return the shard of a parameter that this rank's optimizer updates, or None."""
        return self._shares.get(name)

    @cached_property
    def _shares(self) -> Mapping[str, NamedParameter]:
        return {share.name: share for share in self.named}


def reducer_of(
    named: Sequence[NamedParameter], world: World, grid: FixedPointGrid | None, *, compress: Compression | None = None
) -> Reducer:
    """Return the reducer that sums the gradients of unsharded parameters over `world`."""
    if grid is not None:
        return ExactReducer(named=named, world=world, grid=grid)
    if compress is not None and compress.is_on and world.world_size > 1:
        return compressed_reducer(compress, named=named, world=world)
    return LocalReducer(named=named) if world.world_size == 1 else BucketReducer(named=named, world=world)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The layout, groups and earlier splits that determine how parameters are partitioned over data-parallel ranks.

    `base_specs`: the shard specs of the parameters after tensor parallelism; empty if all are full tensors.
    `absent_names`: the parameters of other pipeline stages, None without a pipeline. `expert_names`: the parameters of
    experts, which are not sharded. `full_tensor_names`: the parameters whose update rule needs the full tensor.
    `deferred_rows`: this rank's rows of parameters that are still on the meta device.
    """

    asked: Layout
    how: PlacementSettings
    data: DataGroups
    grid: FixedPointGrid | None
    base: Parts
    hollow: Collection[str] | None
    without: Collection[str]
    whole: Sequence[str]
    rows: DeferredRows | None


def replicate(named: Sequence[NamedParameter], by: Sharding) -> Partition:
    """Keep all parameters on each data-parallel rank, and sum their gradients over these ranks."""
    leaves = [member.parameter for member in named]
    reducer = reducer_of(named, by.data.all, by.grid, compress=by.data.compress)
    return Partition(
        named=named, parts=by.base, tensors={}, reducer=reducer, spread=do_nothing, settle=do_nothing, leaves=leaves
    )


def divide_rows(model: nn.Module, named: Sequence[NamedParameter], by: Sharding, *, stage: int) -> Partition:
    """Shard the optimizer state, and at ZeRO stage 2 the gradients, over the data-parallel ranks.

    Raises:
        LayoutError: a parameter can't be sharded.
    """
    parts = by.base or None
    return _partition(
        shard_zero12(stage=stage, model=model, named=named, data=by.data, grid=by.grid, parts=parts, whole=by.whole)
    )


def divide_fully(model: nn.Module, named: Sequence[NamedParameter], by: Sharding) -> Partition:
    """Shard parameters, gradients and optimizer state over the data-parallel ranks.

    Raises:
        LayoutError: a parameter can't be sharded.
    """
    return _partition(
        shard_fully(
            model,
            named=named,
            data=by.data,
            grid=by.grid,
            parts=by.base or None,
            asked=fsdp_options(model, asked=by.asked, how=by.how),
            hollow=by.hollow,
            without=by.without,
            rows=by.rows,
        )
    )


def _partition(sharded: Sharded) -> Partition:
    return Partition(
        named=sharded.shares,
        parts=sharded.parts,
        tensors=sharded.locals,
        reducer=sharded.reducer,
        spread=sharded.spread,
        settle=sharded.settle,
        leaves=sharded.sources,
    )


def with_experts(split: Partition, *, live: Sequence[NamedParameter], peers: World, routed: Parts) -> Partition:
    """Add this rank's expert parameters to a partition; they are not sharded.

    The experts get the tokens of all ranks, so their gradients are summed only over `expert_replicas`, the ranks that
    hold the same experts.
    """
    theirs = [member for member in live if member.name in routed]
    own = reducer_of(theirs, peers, None)
    return replace(
        split,
        named=sorted([*split.named, *theirs], key=lambda member: member.index),
        leaves=[*split.leaves, *(member.parameter for member in theirs)],
        parts={**split.parts, **routed},
        tensors={name: tensor for name, tensor in split.tensors.items() if name not in routed},
        reducer=ComposedReducer([split.reducer, own], needs_equal_microbatches=True),
    )


def held_now(before: LocalTensor, split: Partition, hollow: Collection[str]) -> LocalTensor:
    """Return the shard of a parameter or buffer that this rank's model holds after placement."""
    if before.name in hollow:
        return replace(before, part=ShardSpec.none_of(before.part.shape))
    part = split.parts.get(before.name)
    if part is None or before.is_buffer:
        return before
    if before.name not in split.tensors:
        return replace(before, part=part)
    return replace(before, part=part, find=partial(Tensor.detach, split.tensors[before.name]))


def kept_now(member: NamedParameter, share: NamedParameter | None, base: Parts) -> LocalTensor:
    """Return the shard of a parameter that this rank's optimizer updates."""
    shape, dtype = member.parameter.shape, member.parameter.dtype
    if share is None:
        return LocalTensor(name=member.name, part=ShardSpec.none_of(shape), dtype=dtype, find=_absent)
    part = share.part if isinstance(share, RowShard) else base.get(member.name, ShardSpec.all_of(shape))
    return LocalTensor(name=member.name, part=part, dtype=dtype, find=partial(Tensor.detach, share.parameter))


def _absent() -> Tensor:
    raise AssertionError("this rank has no shard of the parameter")


def do_nothing() -> None:
    """Do nothing: some layouts need no synchronization after an update."""
