"""Sequential forwards: after its microbatch, a rank sends the norm statistics to the rank of the next microbatch.

This is needed if a forward reads or changes the state of earlier microbatches. Examples are a pass in eval mode inside
a training step, and a momentum that decays from call to call. A rank waits only for the forward of the previous
microbatch, so backwards still run concurrently. Numbers in module attributes are sent too, because a forward may
compute a momentum from them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import PendingMessage, World
from paceline.parallel.module_access.forward_counters import ForwardNumbers
from paceline.parallel.module_access.number_values import NUM_PER_VALUE
from paceline.torch_internals.private_api import NormBase


class StatisticsRelay:
    """A relay of the running statistics of `modules`, and of `numbers`, from microbatch to microbatch.

    Rank j % world_size of `world` runs microbatch j. In each step, every rank calls `begin`. Then each rank calls
    `receive(j)` before and `send(j)` after its forward of microbatch j, in order. At the end, every rank calls
    `broadcast_last`.
    """

    def __init__(self, modules: Sequence[NormBase], *, numbers: ForwardNumbers, world: World) -> None:
        self._modules = modules
        self._numbers = numbers
        self._world = world
        self._num_micro = 0
        self._sent_values: Tensor | None = None
        self._pending_send: PendingMessage | None = None

    def begin(self, *, num_micro: int) -> None:
        """Start a step of `num_micro` microbatches over all ranks."""
        self._finish_send()
        self._num_micro = num_micro

    def receive(self, microbatch: int) -> None:
        """Wait for the statistics after the previous microbatch, and load them."""
        source = self._rank_of(microbatch - 1)
        if microbatch > 0 and source != self._world.rank:
            values = self._pack()
            self._world.start_receive(values, source=source, tag=microbatch).wait()
            self._unpack(values)

    def send(self, microbatch: int) -> None:
        """Send the statistics after this microbatch to the rank of the next microbatch."""
        next_microbatch = microbatch + 1
        target = self._rank_of(next_microbatch)
        if next_microbatch < self._num_micro and target != self._world.rank:
            self._finish_send()
            self._sent_values = self._pack()
            self._pending_send = self._world.start_send(self._sent_values, to=target, tag=next_microbatch)

    def broadcast_last(self) -> None:
        """Broadcast the statistics after the last microbatch to every rank."""
        self._finish_send()
        if self._num_micro:
            self._unpack(self._world.broadcast(self._pack(), source=self._rank_of(self._num_micro - 1)))

    def _rank_of(self, microbatch: int) -> int:
        return microbatch % self._world.world_size

    def _finish_send(self) -> None:
        if self._pending_send is not None:
            self._pending_send.wait()
        self._sent_values, self._pending_send = None, None

    def _pack(self) -> Tensor:
        """Return statistics and numbers as one float64 tensor, which represents all of them exactly."""
        statistics = [tensor.detach().reshape(-1).double() for tensor in self._statistics()]
        numbers = self._numbers.numbers.encode(self._numbers.names)
        return torch.cat([*statistics, torch.tensor(numbers, dtype=torch.float64, device=self._world.device)])

    def _unpack(self, values: Tensor) -> None:
        tensors = self._statistics()
        *statistics, numbers = values.split([*(t.numel() for t in tensors), NUM_PER_VALUE * len(self._numbers.names)])
        for tensor, value in zip(tensors, statistics, strict=True):
            tensor.data.copy_(value.view_as(tensor))  # `.data` bypasses autograd: no later backward uses these values
        self._numbers.numbers.decode(self._numbers.names, numbers.tolist())

    def _statistics(self) -> list[Tensor]:
        statistics = [(module.running_mean, module.running_var, module.num_batches_tracked) for module in self._modules]
        return [tensor for tensors in statistics for tensor in tensors if tensor is not None]
