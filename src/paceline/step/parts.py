"""What a step is made of."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.place.batchnorm import StatisticsTape
from paceline.place.buffers import BufferPolicy
from paceline.place.context.sequence import ContextParallel
from paceline.place.divide import nothing
from paceline.place.replicate import Reducer
from paceline.place.sync_bn import Rounds
from paceline.place.views import write
from paceline.step.loss import LossContract
from paceline.step.turns import ALONE, Turns
from paceline.step.update import Update
from paceline.streams import Streams
from paceline.world import World
from paceline.worlds import Worlds

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Portion:
    """A rank's part of a microbatch; the model runs on it `inside`, and its backward runs in `again`."""

    data: Any
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    again: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One replica's. `take_back` is called where a step whose gradients were added up is not taken."""

    model: nn.Module
    worlds: Worlds
    contract: LossContract
    reducer: Reducer
    tape: StatisticsTape
    buffers: BufferPolicy
    update: Update
    streams: Streams
    precision: str = "fp32"
    exact: bool = False
    rounds: Rounds | None = None
    turns: Turns = ALONE
    context: ContextParallel | None = None
    take_back: Callable[[], None] = nothing

    def portion(self, batch: Any) -> Portion:
        """What this rank has of a microbatch that is on its device: all, or its slice of the sequence."""
        if self.context is None:
            return Portion(data=batch)
        part = self.context.cut(batch)
        return Portion(
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
                write(buffer.data, value)
            if self.rounds is not None:
                self.rounds.weight = 1.0

    def autocast(self) -> AbstractContextManager[None]:
        """The precision that forward and loss run in. The cache would hold a copy of every weight to the forward's end,
        also of those that are sharded or run again, and would save nothing but the second cast of a tied one."""
        dtype = _AUTOCAST.get(self.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=dtype, cache_enabled=False)
