"""The tape of one norm's running statistics in a step, and its replay in the order of microbatches."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.parallel.activation_checkpointing.buffer_guard import is_stand_in
from paceline.parallel.batchnorm.norm_kernel_calls import Call, KernelWatch, statistics_of
from paceline.parallel.batchnorm.order_dependence import OrderNeed
from paceline.torch_internals.private_api import NormBase, tensor_version


@dataclass
class NormTape:
    """The record of one norm's statistics in a step, by microbatch.

    `initial_statistics` and `initial_count`: the statistics and the batch count at the start of the step. `calls`: the
    calls of each microbatch. `count_increments`: the increments of the batch count. `begins_training`: the norm's mode
    at the start of the step. `is_inside`: a call of the norm is running. The other flags are those of
    `OrderDependence`.
    """

    name: str
    module: NormBase
    before: Tensor
    count: Tensor | None
    rows: dict[int, list[Call]] = field(default_factory=dict)
    bumps: dict[int, int] = field(default_factory=dict)
    is_read: bool = False
    is_repeated: bool = False
    is_moved: bool = False
    is_bypassed: bool = False
    is_shown: bool = False
    is_inside: bool = False
    moves: int = 0
    started: list[float | None] = field(default_factory=list)
    watches: list[KernelWatch] = field(default_factory=list)
    looked: tuple[int, ...] = ()
    begins_training: bool = True

    @property
    def width(self) -> int:
        """Return the width of a tape row: mean, variance and the weight of one call."""
        return self.before.numel() + 1

    @property
    def is_there(self) -> bool:
        """Return whether the norm has statistics now; user code may remove them temporarily."""
        return self.module.running_mean is not None and not is_stand_in(self.module.running_mean)

    def states(self, microbatch: int) -> list[Tensor]:
        """Return the statistics during a microbatch: at its start and after each call."""
        return [self.before, *(after for after, _ in self.rows.get(microbatch, []))]

    def start_momentum(self) -> None:
        """Record the momentum before a microbatch."""
        self.started = [self._momentum()]

    def end_momentum(self) -> None:
        """Count the consecutive microbatches that changed the momentum."""
        if self.started:
            moved = self.started[0] != self._momentum()
            self.is_moved, self.moves = self.is_moved or moved, self.moves + 1 if moved else 0
            self.started = []

    def look(self) -> None:
        """Record the identity and version of the statistics, to detect later writes."""
        self.looked = self._look()

    def was_touched(self) -> bool:
        """Return whether the statistics were replaced or written to since `record_version`."""
        return self._look() != self.looked

    def write(self, statistics: Tensor, calls: int) -> None:
        """Set mean and variance, and set the batch count to `initial_count` plus `calls`."""
        module, half = self.module, statistics.numel() // 2
        if module.running_mean is None or module.running_var is None:
            return
        # `.data` bypasses autograd's version check: later backwards of other microbatches don't use these values
        module.running_mean.data.copy_(statistics[:half].view_as(module.running_mean))
        module.running_var.data.copy_(statistics[half:].view_as(module.running_var))
        if module.num_batches_tracked is not None and self.count is not None:
            module.num_batches_tracked.data.copy_(self.count + calls)
        self.look()

    def _momentum(self) -> float | None:
        return None if self.module.momentum is None else float(self.module.momentum)

    def _look(self) -> tuple[int, ...]:
        parts = (self.module.running_mean, self.module.running_var)
        return tuple(number for part in parts if part is not None for number in (id(part), tensor_version(part)))


@dataclass(frozen=True)
class TapedCalls:
    """The calls of one norm on all ranks: the number of calls and the count increments of each microbatch.

    `is_split`: the norm began the step in eval mode on some ranks and in training mode on others.
    """

    layer: NormTape
    by_microbatch: list[int]
    bumps: list[int]
    need: OrderNeed
    is_split: bool


def norms_with_statistics(model: nn.Module) -> list[tuple[str, NormBase]]:
    """Return the norms that keep running statistics, by FQN; a shared one appears once."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, NormBase) and module.running_mean is not None and not module.running_mean.is_meta
    ]


def folded_statistics(calls: TapedCalls, tape: Tensor) -> Tensor:
    """Return the statistics of one process after all calls.

    After the first microbatch they are bitwise equal to those of the rank that ran it.
    """
    layer, rows = calls.layer, iter(tape.view(-1, calls.layer.width))
    start = layer.before.to(tape.dtype)
    now, earlier = start, 0
    for count, bumps in zip(calls.by_microbatch, calls.bumps, strict=True):
        there = start
        for _ in range(count):
            row = next(rows)
            after, weight = row[:-1], float(row[-1])
            if now is there:
                now = after
            elif weight >= 0.0:
                now = torch.add(after, now - there, alpha=1.0 - weight)
            else:
                number = round(-1.0 / weight)
                batch = torch.add(there, after - there, alpha=number)
                now = now + (batch - now) / (number + earlier)
            there = after
        earlier += bumps
    return now


def open_tape(name: str, module: NormBase) -> NormTape:
    """Return the empty tape of a norm."""
    return NormTape(name, module, statistics_of(module), batches_tracked(module))


def batches_tracked(module: NormBase) -> Tensor | None:
    """Return a copy of the norm's count of batches, None if it has none."""
    return None if module.num_batches_tracked is None else module.num_batches_tracked.detach().clone()
