"""All-reduce a bucket of quantized gradients by an all-to-all of the chunks and an all-gather of their sums.

Each rank sums one chunk, in rank order and in full precision, so that all replicas get the same bits. Each rank sends
as many numbers as in a reduce-scatter and an all-gather.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.compression.codecs import Codec
from paceline.parallel.compression.residual_memory import accumulation_dtype
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.sharding.flat_buffer import start_all_gather
from paceline.torch_internals.private_api import copy_all


class QuantizedBucket:
    """A bucket of quantized gradients. Each parameter starts a new block and is padded with zeros to complete blocks.

    The bucket also reduces `num_flags` flags, which mark the parameters that got a gradient on any rank.
    """

    def __init__(self, members: Sequence[NamedParameter], *, codec: Codec, ranks: int, num_flags: int = 0) -> None:
        self.members = list(members)
        self.num_ready = 0
        self.wait: Callable[[], object] | None = None
        self._parameters = [member.parameter for member in members]
        self._codec, self._ranks = codec, ranks
        first = self._parameters[0]
        sizes = [_round_up(p.numel(), codec.block) for p in self._parameters]
        self._chunk_numel = _round_up(max(1, -(-sum(sizes) // ranks)), codec.block)
        self._flat = torch.zeros(self._chunk_numel * ranks, dtype=accumulation_dtype(first.dtype), device=first.device)
        starts = [0, *accumulate(sizes[:-1])]
        self._views = [
            self._flat[start : start + p.numel()].view(p.shape)
            for start, p in zip(starts, self._parameters, strict=True)
        ]
        self.flags = torch.zeros(num_flags, dtype=torch.uint8, device=first.device) if num_flags else None
        self._world: World | None = None
        self._packed = self._received = self._flat
        self._wait_second: Callable[[], object] | None = None
        self._wait_flags: Callable[[], object] | None = None
        self._is_finished = False

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends for this bucket."""
        flags = 0 if self.flags is None else self.flags.numel()
        return 2 * (ranks - 1) * (self._codec.num_bytes(self._chunk_numel) + flags / ranks)

    def reset(self) -> None:
        """Reset the bucket for a new step, after waiting for messages of a dropped step."""
        for wait in (self.wait if self._wait_second is None else self._wait_second, self._wait_flags):
            if wait is not None and not self._is_finished:
                wait()
        self.num_ready, self.wait, self._wait_second, self._wait_flags, self._is_finished = 0, None, None, None, False

    def launch(self, world: World) -> None:
        """Pack the gradients, and start to send a chunk to each rank."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._flat.zero_()
        copy_all(self._views, grads)
        for parameter in self._parameters:
            parameter.grad = None
        self._world = world
        if self.flags is not None:
            self._wait_flags = world.start_all_reduce(self.flags, op="max")
        self._packed = self._codec.pack(self._flat.view(self._ranks, -1))
        self._received = torch.empty_like(self._packed)
        self.wait = world.start_all_to_all(self._received, self._packed)

    def start_second_message(self) -> None:
        """Wait until all ranks have sent this rank's chunk, sum it, and start to send the sums to all ranks."""
        if self._wait_second is not None:
            return
        assert self.wait is not None and self._world is not None
        self.wait()
        total, *peer_chunks = self._codec.unpack(self._received, dtype=self._flat.dtype)
        for peer_chunk in peer_chunks:
            total += peer_chunk
        self._packed = self._codec.pack(total.unsqueeze(0))[0]
        self._received = torch.empty(self._ranks, len(self._packed), dtype=torch.uint8, device=self._flat.device)
        self._wait_second = start_all_gather(self._packed, out=self._received, world=self._world)

    def finish(self, divisor: float | Tensor | None) -> None:
        """Write the sums, divided by `divisor`, to every `.grad`."""
        assert self._wait_second is not None
        self._wait_second()
        if self._wait_flags is not None:
            self._wait_flags()
        self._is_finished = True
        self._flat.view(self._ranks, -1).copy_(self._codec.unpack(self._received, dtype=self._flat.dtype))
        if divisor is not None:
            self._flat.div_(divisor)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view.to(parameter.dtype)


def _round_up(numbers: int, block: int) -> int:
    return -(-numbers // block) * block
