"""Top-k compression: the largest elements of a gradient are sent, the rest is the residual (Stich et al., 2018)."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.parallel.compression.residual_memory import DoubleBufferedTensors, accumulation_dtype
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.sharding.flat_buffer import start_all_gather


class TopKBucket:
    """A bucket that sends only the largest elements of each gradient; of equal elements, it sends the first ones."""

    def __init__(self, members: Sequence[NamedParameter], *, compression: Compression) -> None:
        self._parameters = [member.parameter for member in members]
        first = self._parameters[0]
        dtype = accumulation_dtype(first.dtype)
        shapes = {member.name: member.parameter.shape for member in members}
        self.residuals = DoubleBufferedTensors(shapes, dtype=dtype, device=first.device)
        self._sizes = [p.numel() for p in self._parameters]
        self._counts = [compression.num_selected(size) for size in self._sizes]
        self._sum = torch.zeros(sum(self._sizes), dtype=dtype, device=first.device)
        self._index_dtype = torch.int32 if sum(self._sizes) < 1 << 31 else torch.int64
        self._received = self._sent = self._sum
        self._wait: Callable[[], object] | None = None

    @property
    def persistent_buffers(self) -> tuple[DoubleBufferedTensors, ...]:
        """Return the buffers that persist from step to step."""
        return (self.residuals,)

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends for this bucket."""
        return (ranks - 1) * sum(self._counts) * (self._index_dtype.itemsize + self._sum.itemsize)

    def launch(self, world: World) -> None:
        """Select the largest elements, and send them."""
        self.residuals.add_gradients([torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters])
        residual = self.residuals.next_flat
        indices = torch.cat(list(self._largest_indices(residual)))
        values = residual[indices]
        residual[indices] = 0.0
        self._sent = torch.cat([indices.to(self._index_dtype).view(torch.uint8), values.view(torch.uint8)])
        self._received = torch.empty(world.world_size, len(self._sent), dtype=torch.uint8, device=residual.device)
        self._wait = start_all_gather(self._sent, out=self._received, world=world)

    def start_second_message(self) -> None:
        """Do nothing: there is only one message."""

    def finish(self) -> Tensor:
        """Sum all ranks' elements in rank order, and return a number that is finite if every gradient is."""
        assert self._wait is not None
        self._wait()
        self._sum.zero_()
        num_index_bytes = sum(self._counts) * self._index_dtype.itemsize
        for message in self._received:
            indices = message[:num_index_bytes].clone().view(self._index_dtype)
            values = message[num_index_bytes:].clone().view(self._sum.dtype)
            self._sum.index_add_(0, indices.long(), values)
        for parameter, total in zip(self._parameters, self._sum.split(self._sizes), strict=True):
            parameter.grad = total.view(parameter.shape).to(parameter.dtype)
        return self._sum.sum(dtype=torch.float64)

    def _largest_indices(self, gradients: Tensor) -> Iterator[Tensor]:
        start = 0
        for gradient, count in zip(gradients.split(self._sizes), self._counts, strict=True):
            yield largest_element_indices(gradient, count) + start
            start += len(gradient)


def largest_element_indices(values: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` elements of largest magnitude; NaN is treated as infinite."""
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    magnitudes = values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    threshold = torch.topk(magnitudes, count, sorted=False).values.amin()
    candidates = (magnitudes >= threshold).nonzero().flatten()
    num_excess = len(candidates) - count
    if not num_excess:
        return candidates
    mask = torch.ones(len(candidates), dtype=torch.bool, device=values.device)
    mask[(magnitudes[candidates] == threshold).nonzero().flatten()[-num_excess:]] = False
    return candidates[mask]
