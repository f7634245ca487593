"""Record one norm's running statistics in a step on a tape, and replay the tape in the order of microbatches."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.parallel.activation_checkpointing.buffer_guard import is_stand_in
from paceline.parallel.batchnorm.norm_kernel_calls import Call, KernelWatch, copy_statistics
from paceline.parallel.batchnorm.order_dependence import OrderDependence
from paceline.torch_internals.private_api import NormBase, tensor_version


@dataclass
class NormTape:
    """The record of one norm's statistics in a step. The flags without a comment are those of `OrderDependence`."""

    name: str
    module: NormBase
    initial_statistics: Tensor
    """The statistics at the start of the step."""
    initial_count: Tensor | None
    """The batch count at the start of the step; None if the norm has none."""
    calls: dict[int, list[Call]] = field(default_factory=dict)
    """The calls of the norm, by microbatch."""
    count_increments: dict[int, int] = field(default_factory=dict)
    """The increase of the batch count, by microbatch."""
    uses_eval_mode: bool = False
    is_recomputed: bool = False
    momentum_changed: bool = False
    is_bypassed: bool = False
    is_read: bool = False
    is_inside: bool = False
    """Whether the norm is being called."""
    num_momentum_changes: int = 0
    """The number of consecutive microbatches that changed the momentum."""
    momentum_before: list[float | None] = field(default_factory=list)
    """The momentum before the running microbatch; empty between microbatches."""
    watches: list[KernelWatch] = field(default_factory=list)
    """The watches of the running calls."""
    recorded_version: tuple[int, ...] = ()
    begins_training: bool = True
    """Whether the norm is in training mode at the start of the step."""

    @property
    def width(self) -> int:
        """Return the width of a tape row: mean, variance and the weight of one call."""
        return self.initial_statistics.numel() + 1

    @property
    def has_statistics(self) -> bool:
        """Return whether the norm has statistics now; user code may remove them temporarily."""
        return self.module.running_mean is not None and not is_stand_in(self.module.running_mean)

    def statistics_during(self, microbatch: int) -> list[Tensor]:
        """Return the statistics during a microbatch: at its start and after each call."""
        return [self.initial_statistics, *(after for after, _ in self.calls.get(microbatch, []))]

    def record_momentum(self) -> None:
        """Record the momentum before a microbatch."""
        self.momentum_before = [self._momentum()]

    def compare_momentum(self) -> None:
        """Count the consecutive microbatches that changed the momentum."""
        if self.momentum_before:
            has_changed = self.momentum_before[0] != self._momentum()
            self.momentum_changed, self.num_momentum_changes = (
                self.momentum_changed or has_changed,
                self.num_momentum_changes + 1 if has_changed else 0,
            )
            self.momentum_before = []

    def record_version(self) -> None:
        """Record the identity and version of the statistics, to detect later writes."""
        self.recorded_version = self._version()

    def is_modified(self) -> bool:
        """Return whether the statistics were replaced or written to since `record_version`."""
        return self._version() != self.recorded_version

    def write_statistics(self, statistics: Tensor, count_increment: int) -> None:
        """Set mean and variance, and set the batch count to `initial_count` plus `count_increment`."""
        module, num_channels = self.module, statistics.numel() // 2
        if module.running_mean is None or module.running_var is None:
            return
        # `.data` bypasses autograd's version check: later backwards of other microbatches don't use these values
        module.running_mean.data.copy_(statistics[:num_channels].view_as(module.running_mean))
        module.running_var.data.copy_(statistics[num_channels:].view_as(module.running_var))
        if module.num_batches_tracked is not None and self.initial_count is not None:
            module.num_batches_tracked.data.copy_(self.initial_count + count_increment)
        self.record_version()

    def _momentum(self) -> float | None:
        return None if self.module.momentum is None else float(self.module.momentum)

    def _version(self) -> tuple[int, ...]:
        tensors = (self.module.running_mean, self.module.running_var)
        return tuple(number for t in tensors if t is not None for number in (id(t), tensor_version(t)))


@dataclass(frozen=True)
class TapedCalls:
    """The calls of one norm on all ranks: the number of calls and the count increments of each microbatch.

    `is_split`: the norm began the step in eval mode on some ranks and in training mode on others.
    """

    norm_tape: NormTape
    num_calls: list[int]
    count_increments: list[int]
    dependence: OrderDependence
    is_split: bool


def norms_with_statistics(model: nn.Module) -> list[tuple[str, NormBase]]:
    """Return the name and module of each norm with running statistics; a shared norm appears once."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, NormBase) and module.running_mean is not None and not module.running_mean.is_meta
    ]


def fold_statistics(calls: TapedCalls, tape: Tensor) -> Tensor:
    """Return the statistics of one process after all calls.

    Their values after the first microbatch are bitwise equal to those on the rank that ran this microbatch.
    """
    norm_tape, rows = calls.norm_tape, iter(tape.view(-1, calls.norm_tape.width))
    start = norm_tape.initial_statistics.to(tape.dtype)
    folded, num_earlier = start, 0
    for num_calls, increments in zip(calls.num_calls, calls.count_increments, strict=True):
        local_statistics = start  # those of the rank that ran this microbatch
        for _ in range(num_calls):
            row = next(rows)
            after, weight = row[:-1], float(row[-1])
            if folded is local_statistics:
                folded = after
            elif weight >= 0.0:
                folded = torch.add(after, folded - local_statistics, alpha=1.0 - weight)
            else:
                local_count = round(-1.0 / weight)  # a cumulative average: the batches that this rank has counted
                batch_statistics = torch.add(local_statistics, after - local_statistics, alpha=local_count)
                folded = folded + (batch_statistics - folded) / (local_count + num_earlier)
            local_statistics = after
        num_earlier += increments
    return folded


def open_tape(name: str, module: NormBase) -> NormTape:
    """Return the empty tape of a norm."""
    return NormTape(name, module, copy_statistics(module), copy_batch_count(module))


def copy_batch_count(module: NormBase) -> Tensor | None:
    """Return a copy of the norm's count of batches, None if it has none."""
    return None if module.num_batches_tracked is None else module.num_batches_tracked.detach().clone()
