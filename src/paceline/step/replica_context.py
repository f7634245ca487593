"""What a step is made of."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.parallel.batchnorm.running_statistics import MicrobatchStatistics
from paceline.parallel.batchnorm.sync_batchnorm import SyncBatchNormWeights
from paceline.parallel.build_reducer import do_nothing
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.data_parallel.module_buffers import BufferPolicy
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.step.loss.loss_return_value import LossContract
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.step.shared_memory.rng_turns import ALONE, Turns
from paceline.torch_internals.rng import RandomStreams

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class LocalMicrobatch:
    """A rank's part of a microbatch; the model runs on it `inside`, and its backward runs in `again`."""

    data: Any
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    again: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """One replica's. `take_back` is called where a step whose gradients were added up is not taken."""

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
        """What this rank has of a microbatch that is on its device: all, or its slice of the sequence."""
        if self.context is None:
            return LocalMicrobatch(data=batch)
        part = self.context.cut(batch)
        return LocalMicrobatch(
            data=part.data, inside=partial(self.context.forward, part), again=partial(self.context.backward, part)
        )

    @property
    def world(self) -> World:
        """Everybody."""
        return self.worlds.every

    @property
    def meets(self) -> bool:
        """Whether a forward or backward waits for the other replicas': then all run equally many."""
        return self.rounds is not None or self.reducer.meets

    @contextmanager
    def weightless(self) -> Iterator[None]:
        """For a microbatch that counts nothing: it leaves no trace in running statistics or other buffers."""
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
        """The precision that forward and loss run in. The cache would hold a copy of every weight to the forward's end,
        also of those that are sharded or run again, and would save nothing but the second cast of a tied one."""
        dtype = _AUTOCAST.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=dtype, cache_enabled=False)
