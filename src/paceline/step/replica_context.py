"""The components that one replica needs to run a step.

If a feature is off, its component is None or missing from the list that the step goes through.
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
from paceline.parallel.batchnorm.sync_batchnorm import SyncBatchNormWeights
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.data_parallel.module_buffers import BufferPolicy
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.parallel.sharding.unit_guard import forward_runs
from paceline.step.loss.loss_return_value import LossContract
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.step.step_totals import LossReporter
from paceline.torch_internals.pytree import to_device
from paceline.torch_internals.rng import RandomStreams

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Turns(Protocol):
    """A policy for when a microbatch may run."""

    def forward(self, seed: Callable[[], None]) -> AbstractContextManager[None]:
        """Return the context for a forward and its loss, entered after `seed()`."""

    def backward(self) -> AbstractContextManager[None]:
        """Return the context for a backward."""


class Tape(Protocol):
    """A record of what forwards change besides gradients, which at the end of a step is that of one process."""

    @property
    def waits(self) -> bool:
        """Return whether forwards run in the order of one process, each after the previous one."""

    def begin(self, *, num_micro: int = 0) -> None:
        """Start a step of `num_micro` microbatches over all ranks, or start the same step again."""

    def at(self, microbatch: int, *, counts: bool = True) -> None:
        """Set the microbatch of the next forward or backward; without `counts` it is a stand-in."""

    def watching(self) -> AbstractContextManager[object]:
        """Return the context for a forward and its loss, or a backward."""

    def left(self, microbatch: int) -> None:
        """End this microbatch's forward."""

    def fold(self, *, num_micro: int) -> bool:
        """Make the changes those of one process; return False, on all ranks, if the step must be repeated."""

    def undo(self) -> None:
        """Restore what the step has changed, because it was skipped."""

    def new_notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""

    def close(self) -> None:
        """Remove the module hooks."""


@dataclass(frozen=True)
class LocalMicrobatch:
    """A rank's part of a microbatch. The forward runs within `inside()`, the backward within `again()`."""

    data: Any
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    again: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    """Everything one replica needs to run a step. `take_back()` undoes reducer state when a reduced step is skipped.

    `turns` exists only if several replicas are threads of this process.
    """

    model: nn.Module
    worlds: MeshGroups
    contract: LossContract
    reducer: Reducer
    tapes: Sequence[Tape]
    buffers: BufferPolicy
    update: OptimizerUpdate
    streams: RandomStreams
    precision: str = "fp32"
    exact: bool = False
    rounds: SyncBatchNormWeights | None = None
    turns: Turns | None = None
    context: ContextParallel | None = None
    take_back: Callable[[], None] = do_nothing

    @cached_property
    def portion(self) -> Callable[[Any], LocalMicrobatch]:
        """A function from a microbatch on this rank's device to its part of it: all, or a slice of the sequence."""
        return LocalMicrobatch if self.context is None else partial(_slice, self.context)

    @cached_property
    def load(self) -> Callable[[Any], LocalMicrobatch]:
        """The same function for a microbatch in host memory: on a GPU its tensors are moved first."""
        return self.portion if self.world.device.type == "cpu" else self._moved

    def _moved(self, batch: Any) -> LocalMicrobatch:
        return self.portion(to_device(batch, self.world.device))

    @cached_property
    def around_forward(self) -> Sequence[Callable[[], AbstractContextManager[None]]]:
        """The contexts that a forward and its loss run in: only those that this run needs."""
        mesh = self.worlds.mesh
        holds_parts = mesh.zero == 3 or mesh.tp > 1
        return [*([forward_runs] if holds_parts else []), *([self.autocast] if self.precision in _AUTOCAST else [])]

    def loss_reporter(self, *, tells: bool) -> LossReporter:
        """Return a reporter of loss terms to all ranks; `tells` if this rank reports the ones that it computes."""
        return LossReporter(
            world=self.world,
            contract=self.contract,
            buffers=self.watched_buffers,
            tells=tells,
            on_empty=self.update.on_empty,
        )

    @cached_property
    def world(self) -> World:
        """The world of all ranks."""
        return self.worlds.all_ranks

    @property
    def needs_equal_microbatches(self) -> bool:
        """True if a forward or backward waits for other replicas; all must then run equally many microbatches."""
        return self.rounds is not None or self.reducer.needs_equal_microbatches

    @cached_property
    def watched_buffers(self) -> Sequence[BufferPolicy]:
        """The policy of the buffers, if the model has buffers that the policy watches."""
        return [self.buffers] if self.buffers.watches else []

    @contextmanager
    def weightless(self) -> Iterator[None]:
        """Run a microbatch with weight zero: running statistics and other buffers stay unchanged."""
        if self.rounds is not None:
            self.rounds.weight = 0.0
        kept = [] if self.rounds is not None else [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            for buffer, value in kept:
                copy_into(buffer.data, value)
            if self.rounds is not None:
                self.rounds.weight = 1.0

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context that the forward and the loss run in.

        The autocast cache is off. It would keep a copy of every weight until the forward ends, also of weights that are
        sharded or recomputed, and would save only the second cast of a tied weight.
        """
        dtype = _AUTOCAST.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=dtype, cache_enabled=False)


def _slice(context: ContextParallel, batch: Any) -> LocalMicrobatch:
    part = context.cut(batch)
    return LocalMicrobatch(part.data, inside=partial(context.forward, part), again=partial(context.backward, part))
