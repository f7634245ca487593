"""The world of the sequence shards: what ring attention sees as ranks, on any number of processes.

The shards are numbered along the ring, and each process has neighbouring ones. A message between two shards of one
process is handed over, and a message to another process is sent. A tensor that is handed over has the same memory
layout as a received one, since the layout of an operand may change the last bits of a product.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.comm.process_group import Op, Shape, World
from paceline.parallel.context_parallel.shard_threads import ShardThreads

_ALIGNMENT_BYTES = 64


@dataclass(kw_only=True)
class _Round:
    """A message of every shard of this process, and the result once the last shard has posted."""

    values: list[Any]
    num_posted: int = 0
    result: Any = None


@dataclass(frozen=True, kw_only=True)
class _Message:
    """A message to the next shard: its tensors, and the shapes that the sender expects from the previous shard."""

    tensors: list[Tensor]
    shapes: Sequence[Shape]


class ShardExchange:
    """The messages between the shards of this process, and between them and those of the other processes."""

    def __init__(self, *, threads: ShardThreads, process_world: World) -> None:
        self.threads, self.process_world = threads, process_world
        self._rounds: dict[int, _Round] = {}
        self._next_rounds: list[int] = []
        threads.on_start = self.reset
        self.reset()

    def reset(self) -> None:
        """Drop the messages of an unfinished pass."""
        self._rounds, self._next_rounds = {}, [0] * self.threads.num_shards

    def post(self, value: Any, *, position: int, complete: Callable[[list[Any]], Any]) -> Callable[[], Any]:
        """Post a message of the shard at this position of the process; return a function that waits for the result.

        When the last shard posts, it computes the result of the round as `complete(values)`. Every shard must post to
        the same rounds.
        """
        num_shards, number = self.threads.num_shards, self._next_rounds[position]
        self._next_rounds[position] += 1
        round_ = self._rounds.setdefault(number, _Round(values=[None] * num_shards))
        round_.values[position] = value
        round_.num_posted += 1
        if round_.num_posted == num_shards:
            del self._rounds[number]
            round_.result = complete(round_.values)

        def wait() -> Any:
            self.threads.wait_until(lambda: round_.num_posted == num_shards)
            return round_.result

        return wait


@dataclass(frozen=True, kw_only=True)
class ShardWorld(World):
    """The world of one sequence shard. `rank` is the shard's number, and `world_size` the number of shards."""

    exchange: ShardExchange = field(repr=False)

    @property
    def _position(self) -> int:
        """The number of this shard among those of its process."""
        return self.rank % self.exchange.threads.num_shards

    @override
    def all_gather(self, tensor: Tensor, *, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return every shard's tensor. The caller must not change them."""

        def gather(tensors: list[Tensor]) -> list[Tensor]:
            world = self.exchange.process_world
            if world.world_size == 1:
                return tensors
            sizes = [math.prod(shape) for shape in shapes]
            num_local = len(tensors)
            lengths = [(sum(sizes[n : n + num_local]),) for n in range(0, len(sizes), num_local)]
            parts = world.all_gather(torch.cat([part.flatten() for part in tensors]), shapes=lengths)
            return [part.view(shape).clone() for part, shape in zip(torch.cat(parts).split(sizes), shapes, strict=True)]

        posted = _dense(tensor)
        gathered: list[Tensor] = self.exchange.post(posted, position=self._position, complete=gather)()
        return gathered

    @override
    def all_reduce(self, tensor: Tensor, *, op: Op = "sum") -> Tensor:
        """Add the tensors of all shards, in the order of the shards, in place."""
        assert op == "sum", "ring attention and convolutions only add"
        first, *others = self.all_gather(tensor.detach().clone(), shapes=[tuple(tensor.shape)] * self.world_size)
        total = first.clone()
        for other in others:
            total += other
        tensor.detach().copy_(total)
        return tensor

    @override
    def start_ring_shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """Give tensors to the next shard. The returned function waits for the previous shard's tensors.

        The sender must not change the tensors afterwards.
        """

        def shift(messages: list[_Message]) -> tuple[list[_Message], Callable[[], list[Tensor]]]:
            """Start to send the last shard's tensors; return all messages, and a wait for the first shard's tensors."""
            sent, world = messages[-1].tensors, self.exchange.process_world
            if world.world_size == 1:
                return messages, lambda: sent
            return messages, world.start_ring_shift(sent, shapes=messages[0].shapes)

        position = self._position
        message = _Message(tensors=[_dense(tensor) for tensor in tensors], shapes=shapes)
        wait_for_round = self.exchange.post(message, position=position, complete=shift)

        def receive() -> list[Tensor]:
            messages, wait_for_process = wait_for_round()
            received: list[Tensor] = wait_for_process() if position == 0 else messages[position - 1].tensors
            return received

        return receive


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor in the memory layout of a received message: contiguous and aligned.

    Raises:
        RuntimeError: the tensor is on the meta device, as in the placeholder of another pipeline stage.
    """
    if tensor.is_meta:
        raise RuntimeError("a tensor on the meta device can't be sent to another sequence shard")
    tensor = tensor.detach().contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT_BYTES else tensor
