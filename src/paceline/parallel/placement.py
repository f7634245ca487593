"""A model on its way from whole to one rank's part, and the interface of what changes it on the way."""

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
    """What a model is placed for. `example` runs forward and loss on one microbatch; pp needs it.

    `whole` names the parameters whose update rule needs the whole tensor; `say` receives messages for the user.
    `rows` are this rank's rows of parameters without memory; `late` fills them once the parts are known.
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
    """The model as far as it is placed. Each parallelism changes the model in place and adds what others need of it.

    `tensors` and `named` are the parameters and buffers of the whole model. `current` are this rank's trainable
    parameters as they were just before they were divided over the data-parallel ranks.
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
        """Return the placement of a model of which every rank still holds all."""
        tensors, named = all_of(model), trainable_parameters(model)
        return Placement(model=model, request=request, tensors=tensors, named=named, rows=request.rows)

    @property
    def routed(self) -> Parts:
        """The parts of the experts that this rank holds."""
        return {} if self.experts is None else self.experts.parts

    @property
    def base(self) -> Parts:
        """The part of the whole that each parameter is after expert and tensor parallelism; empty if each is whole."""
        if self.experts is None and self.split is None:
            return {}
        whole = {one.name: one.part for one in self.tensors if not one.is_buffer}
        return {**whole, **({} if self.split is None else self.split.parts), **self.routed}

    @property
    def hollow(self) -> frozenset[str]:
        """The names of the parameters of which this rank holds nothing."""
        absent = frozenset[str]() if self.piped is None else self.piped.hollow
        return absent | {name for name, part in self.routed.items() if part.local is None}

    def sharding(self) -> Sharding:
        """Return what the division over the data-parallel ranks has to know."""
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
        """Divide this rank's parameters over the data-parallel ranks; expert parameters stay whole."""
        now, hollow = dict(self.model.named_parameters()), self.hollow
        self.current = [replace(one, parameter=now[one.name]) for one in self.named if one.name not in hollow]
        routed = self.routed
        self.partition = over_ranks([one for one in self.current if one.name not in routed], self.sharding())


@dataclass(frozen=True, kw_only=True)
class ParallelizedModel:
    """A model after placement, as this rank holds it.

    The optimizer updates the parameters in `named`. Call `spread` after each optimizer update, and `settle` after
    the model's own tensors were given other values. `weights` are the parameters and buffers as the ranks' models
    hold them, `kept` the parts of them that the optimizers hold. Autograd writes gradients to `leaves`; `hooked`
    names the parameters with user-registered hooks.
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
        """Return the parameters of `named` that this rank owns; a parameter held by several ranks has one owner."""
        whole = self.kept.is_whole
        return [m.parameter for m in self.named if whole or self.kept.owns(m.name)]

    def close(self) -> None:
        """Remove the wrappers around the model's modules, in reverse order."""
        for undo in reversed(self.undos):
            undo()


class Parallelism(Protocol):
    """One change to a model on the way to this rank's part of it."""

    @property
    def name(self) -> str:
        """What changes, in one or two words."""

    def is_on(self, request: PlacementRequest) -> bool:
        """Return whether this request asks for it."""

    def apply(self, placement: Placement) -> None:
        """Change the model, and add to `placement` what others need.

        Raises:
            LayoutError: a part of the model does not support it.
        """
