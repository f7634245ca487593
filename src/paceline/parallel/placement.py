"""The state of a model while parallelisms are applied to it, and the interface of a parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.config.compression import Compression
from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.expert_parallel.expert_parallel import PlacedExperts
from paceline.parallel.gradients.partition import Partition, Sharding
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.initialization.deferred_fill import DeferredModel
from paceline.parallel.module_access.blocks import Block
from paceline.parallel.module_access.parameters import NamedParameter, trainable_parameters
from paceline.parallel.module_access.shard_spec import Parts
from paceline.parallel.module_access.sharded_tensors import LocalTensor, ShardedTensors, all_of
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.parallel.sharding.fully_sharded import DeferredRows
from paceline.parallel.sharding.sharded_model import DataGroups
from paceline.parallel.tensor_parallel.tensor_parallel import TensorPlaced
from paceline.parallel.tensor_parallel.tensor_plan import TensorPlan
from paceline.parallel.trace_example_forward import ExampleRun


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """The layout and the options for `parallelize`. `example_run` runs forward and loss on one microbatch; pp needs it.

    `full_tensor_names` are the parameters whose update rule needs the full tensor; `report` prints a message for the
    user. If the model is on the meta device, `deferred_model` creates the values, and `deferred_rows` are this rank's
    rows of its parameters.
    """

    asked: Layout
    worlds: MeshGroups
    example: ExampleRun | None
    say: Callable[[str], None]
    how: PlacementSettings = field(default_factory=PlacementSettings)
    exact: bool = False
    compiles: bool = False
    whole: Sequence[str] = ()
    context: ContextParallel | None = None
    rows: DeferredRows | None = None
    late: DeferredModel | None = None
    compress: Compression | None = None


@dataclass(kw_only=True)
class Placement:
    """The state of placement. Each parallelism changes the model in place and stores here what later ones need.

    `tensors` are the parameters and buffers of the full model, `named_parameters` its trainable parameters.
    `current_parameters` are this rank's trainable parameters before they are sharded over the data-parallel ranks.
    """

    model: nn.Module
    request: PlacementRequest
    tensors: Sequence[LocalTensor]
    named: Sequence[NamedParameter]
    uses: TiedUses | None = None
    tensor_plan: TensorPlan | None = None
    piped: PipelineModel | None = None
    experts: PlacedExperts | None = None
    split: TensorPlaced | None = None
    rows: DeferredRows | None = None
    blocks: Sequence[Block] | None = None
    context: ContextParallel | None = None
    grid: FixedPointGrid | None = None
    current: Sequence[NamedParameter] = ()
    partition: Partition | None = None
    undos: list[Callable[[], None]] = field(default_factory=list)

    @staticmethod
    def of_whole(model: nn.Module, request: PlacementRequest) -> "Placement":
        """Return the initial state, in which every rank holds the full model."""
        tensors, named = all_of(model), trainable_parameters(model)
        return Placement(model=model, request=request, tensors=tensors, named=named, rows=request.rows)

    @property
    def routed(self) -> Parts:
        """The shard specs of the experts' parameters on this rank."""
        return {} if self.experts is None else self.experts.parts

    @property
    def base(self) -> Parts:
        """The shard spec of each parameter after expert and tensor parallelism; empty if all are full tensors."""
        if self.experts is None and self.split is None:
            return {}
        whole = {one.name: one.part for one in self.tensors if not one.is_buffer}
        return {**whole, **({} if self.split is None else self.split.parts), **self.routed}

    @property
    def hollow(self) -> frozenset[str]:
        """The names of the parameters that only other ranks hold."""
        absent = frozenset[str]() if self.piped is None else self.piped.hollow
        return absent | {name for name, part in self.routed.items() if part.local is None}

    def sharding(self) -> Sharding:
        """Return the input of the partition over the data-parallel ranks."""
        request, worlds = self.request, self.request.worlds
        return Sharding(
            asked=request.asked,
            how=request.how,
            data=DataGroups(
                all=worlds.summed, shard=worlds.shard, replicas=worlds.shard_replicas, compress=request.compress
            ),
            grid=self.grid,
            base=self.base,
            hollow=None if self.piped is None else self.piped.hollow,
            without=self.routed,
            whole=request.whole,
            rows=self.rows,
        )

    def apply_data_parallel(self, over_ranks: Callable[[Sequence[NamedParameter], Sharding], Partition]) -> None:
        """Partition this rank's parameters over the data-parallel ranks; expert parameters are not sharded."""
        now, hollow = dict(self.model.named_parameters()), self.hollow
        self.current = [replace(one, parameter=now[one.name]) for one in self.named if one.name not in hollow]
        routed = self.routed
        self.partition = over_ranks([one for one in self.current if one.name not in routed], self.sharding())


@dataclass(frozen=True, kw_only=True)
class ParallelizedModel:
    """This rank's part of a model after all parallelisms are applied.

    The optimizer updates `named_parameters`. Call `sync_after_update` after each optimizer update, and
    `sync_after_load` after new values were copied into the model's tensors. `weights` are the parameters and buffers
    of the ranks' models; `optimizer_tensors` are the shards of them that the ranks' optimizers update. Autograd writes
    gradients to `leaf_parameters`. `hooked_names` are the parameters on which the user registered hooks.
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
        """Return the parameters that this rank owns; if several ranks hold a parameter, one of them owns it."""
        whole = self.kept.is_whole
        return [m.parameter for m in self.named if whole or self.kept.owns(m.name)]

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
