"""The components that one replica needs to run a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.parallel.batchnorm.running_statistics import MicrobatchStatistics
from paceline.parallel.batchnorm.sync_batchnorm import SyncBatchNormWeights
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.data_parallel.module_buffers import BufferPolicy
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.step.loss.loss_return_value import LossContract
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.torch_internals.rng import RandomStreams

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Turns(Protocol):
    """A policy for when a microbatch may run."""

    def forward(self, seed: Callable[[], None]) -> AbstractContextManager[None]:
        """Return the context for a forward and its loss, entered after `seed()`."""

    def backward(self) -> AbstractContextManager[None]:
        """Return the context for a backward."""


class _Alone:
    """The turns of a single replica, which never waits."""

    def forward(self, seed: Callable[[], None]) -> AbstractContextManager[None]:
        seed()
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        return nullcontext()


ALONE: Turns = _Alone()


@dataclass(frozen=True, kw_only=True)
class LocalMicrobatch:
    """A rank's part of a microbatch. The forward runs within `inside()`, the backward within `again()`."""

    data: Any
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    again: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Everything one replica needs to run a step. `take_back()` undoes reducer state when a reduced step is skipped."""

    model: nn.Module
    worlds: MeshGroups
    contract: LossContract
    reducer: Reducer
    tape: MicrobatchStatistics
    buffers: BufferPolicy
    update: OptimizerUpdate
    streams: RandomStreams
    precision: str = "fp32"
    exact: bool = False
    rounds: SyncBatchNormWeights | None = None
    turns: Turns = ALONE
    context: ContextParallel | None = None
    take_back: Callable[[], None] = do_nothing

    def portion(self, batch: Any) -> LocalMicrobatch:
        """Return this rank's part of a microbatch that is on its device: all of it, or its slice of the sequence."""
        if self.context is None:
            return LocalMicrobatch(data=batch)
        part = self.context.cut(batch)
        return LocalMicrobatch(
            data=part.data, inside=partial(self.context.forward, part), again=partial(self.context.backward, part)
        )

    @property
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
