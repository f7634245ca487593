"""The components that one replica needs to run a step.

If a feature is off, its component is None, or is left out of the list of such components.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.parallel.batchnorm.sync_batchnorm import SyncBatchNormSampleWeight
from paceline.parallel.context_parallel.context_parallel import BatchShard, ContextParallel
from paceline.parallel.context_parallel.exact_context import ExactContextParallel
from paceline.parallel.data_parallel.module_buffers import BufferPolicy
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.parallel.sharding.unit_guard import guard_sharded_forward
from paceline.step.loss.loss_return_value import LossContract
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.step.step_totals import TotalsBuilder
from paceline.torch_internals.pytree import to_device
from paceline.torch_internals.rng import RandomStreams

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class RngTurns(Protocol):
    """The interface by which replicas in threads take turns, because they share the host's random generators.

    While one replica has its turn, it alone draws random numbers.
    """

    def forward_context(self, seed: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context for a forward and its loss. On entry, it waits for a turn if needed, and calls `seed()`."""

    def backward_context(self) -> AbstractContextManager[None]:
        """Return a context for a backward. On entry, it waits for a turn if needed."""


class ForwardStateRecorder(Protocol):
    """A recorder of state that forwards change, such as running statistics and counters in module attributes.

    At the end of a step, it sets this state to the values that a run in one process would have.
    """

    @property
    def is_sequential(self) -> bool:
        """True if the ranks run their forwards one after another, in the order in which one process would."""

    def begin_step(self, *, num_micro: int = 0) -> None:
        """Start a step, or restart the same step. `num_micro` is its number of microbatches on all ranks."""

    def set_microbatch(self, microbatch: int, *, has_samples: bool = True) -> None:
        """Set the index of the microbatch whose forward or backward runs next. A stand-in has no samples."""

    def recording_context(self) -> AbstractContextManager[object]:
        """Return the context in which a forward with its loss, or a backward, is recorded."""

    def end_forward(self, microbatch: int) -> None:
        """Record the end of this microbatch's forward."""

    def fold(self, *, num_micro: int) -> bool:
        """Set the state to that of one process. If the step must be repeated, return False, on all ranks."""

    def end_skipped_step(self) -> None:
        """End a step whose update was skipped."""

    def new_notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""

    def close(self) -> None:
        """Remove the module hooks."""


@dataclass(frozen=True)
class LocalMicrobatch:
    """A rank's part of a microbatch, and the contexts that its forward and its backward run in.

    Under exact context parallelism, the part consists of `shards`, each with its own forward and backward, and has no
    data of its own. `length` is then the length of the full sequences.
    """

    data: Any
    forward_context: Callable[[], AbstractContextManager[None]] = nullcontext
    backward_context: Callable[[], AbstractContextManager[None]] = nullcontext
    shards: Sequence["LocalMicrobatch"] = ()
    length: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    """Everything that one replica needs to run a step.

    `undo_reduction()` restores the reducer's state from before a step that is skipped or repeated. `rng_turns` is set
    only if several replicas are threads of this process.
    """

    model: nn.Module
    worlds: MeshGroups
    contract: LossContract
    reducer: Reducer
    state_recorders: Sequence[ForwardStateRecorder]
    buffers: BufferPolicy
    update: OptimizerUpdate
    random_streams: RandomStreams
    precision: str = "fp32"
    exact: bool = False
    sync_bn_sample_weight: SyncBatchNormSampleWeight | None = None
    rng_turns: RngTurns | None = None
    context_parallel: ContextParallel | ExactContextParallel | None = None
    undo_reduction: Callable[[], None] = do_nothing

    @cached_property
    def slice_microbatch(self) -> Callable[[Any], LocalMicrobatch]:
        """A function that returns this rank's part of a microbatch that is already on the rank's device.

        Under context parallelism, the part is a slice of each sequence. Otherwise it is the whole microbatch.
        """
        context = self.context_parallel
        if isinstance(context, ExactContextParallel):
            return partial(_slice_for_shards, context)
        return LocalMicrobatch if context is None else partial(_slice_for_rank, context)

    @cached_property
    def load_microbatch(self) -> Callable[[Any], LocalMicrobatch]:
        """A function like `slice_microbatch` for a microbatch in host memory, which it first moves to the device."""
        return self.slice_microbatch if self.world.device.type == "cpu" else self._move_and_slice

    def _move_and_slice(self, batch: Any) -> LocalMicrobatch:
        return self.slice_microbatch(to_device(batch, self.world.device))

    @cached_property
    def forward_contexts(self) -> Sequence[Callable[[], AbstractContextManager[None]]]:
        """Functions that return the contexts in which a forward and its loss run. The list has only those needed.

        `guard_sharded_forward` replaces errors that sharding causes in a forward by clearer ones.
        """
        mesh = self.worlds.mesh
        is_sharded = mesh.zero == 3 or mesh.tp > 1
        return [
            *([guard_sharded_forward] if is_sharded else []),
            *([self.autocast] if self.precision in _AUTOCAST else []),
        ]

    def make_totals_builder(self, *, reports_loss: bool) -> TotalsBuilder:
        """Return the builder of a step's totals over all ranks, with this rank's loss terms if `reports_loss`."""
        return TotalsBuilder(
            world=self.world,
            contract=self.contract,
            buffers=self.watched_buffers,
            reports_loss=reports_loss,
            on_empty=self.update.on_empty,
            num_shards=1 if self.exact_context is None else self.exact_context.num_shards,
        )

    @cached_property
    def exact_context(self) -> ExactContextParallel | None:
        """Exact context parallelism, or None if sequences are not split into a fixed number of shards."""
        return self.context_parallel if isinstance(self.context_parallel, ExactContextParallel) else None

    @cached_property
    def shard_numbers(self) -> Sequence[int]:
        """The numbers of this rank's sequence shards; zero alone without exact context parallelism."""
        return range(1) if self.exact_context is None else self.exact_context.shard_numbers

    @cached_property
    def world(self) -> World:
        """The world of all ranks."""
        return self.worlds.all_ranks

    @property
    def needs_equal_microbatches(self) -> bool:
        """True if a forward or backward waits for other replicas; all must then run the same number of microbatches."""
        return self.sync_bn_sample_weight is not None or self.reducer.needs_equal_microbatches

    @cached_property
    def watched_buffers(self) -> Sequence[BufferPolicy]:
        """A list with the buffer policy, or an empty list if the model has no buffer that the policy watches."""
        return [self.buffers] if self.buffers.has_watched_buffers else []

    @contextmanager
    def zero_weight_context(self) -> Iterator[None]:
        """Return a context for a stand-in microbatch, which has the weight zero and must not change the training.

        On exit, all buffers get back their old values. If BatchNorm is synchronized over ranks, buffers are not
        restored. This rank's samples then have the weight zero in the joint statistics.
        """
        if self.sync_bn_sample_weight is not None:
            self.sync_bn_sample_weight.weight = 0.0
        saved_buffers = (
            []
            if self.sync_bn_sample_weight is not None
            else [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        )
        try:
            yield
        finally:
            for buffer, value in saved_buffers:
                copy_into(buffer.data, value)
            if self.sync_bn_sample_weight is not None:
                self.sync_bn_sample_weight.weight = 1.0

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context that the forward and the loss run in.

        The autocast cache is off. It would keep a copy of every weight until the forward ends, even of sharded and
        recomputed weights, and would save only the second cast of a tied weight.
        """
        dtype = _AUTOCAST.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=dtype, cache_enabled=False)


def _slice_for_shards(context: ExactContextParallel, batch: Any) -> LocalMicrobatch:
    shards = context.shard(batch)
    return LocalMicrobatch(
        None,
        shards=[_make_microbatch(shard_context, batch_slice) for shard_context, batch_slice in shards],
        length=shards[0][1].sharding.length,
    )


def _slice_for_rank(context_parallel: ContextParallel, batch: Any) -> LocalMicrobatch:
    return _make_microbatch(context_parallel, context_parallel.shard(batch))


def _make_microbatch(context_parallel: ContextParallel, batch_slice: BatchShard) -> LocalMicrobatch:
    return LocalMicrobatch(
        batch_slice.data,
        forward_context=partial(context_parallel.forward, batch_slice),
        backward_context=partial(context_parallel.backward, batch_slice),
    )
