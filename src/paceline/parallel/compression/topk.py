"""Top-k compression: send the largest elements of each gradient, keep the rest as residual (Stich et al. 2018)."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.parallel.compression.residual_memory import ResidualBuffers, accumulation_dtype
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.sharding.flat_buffer import start_all_gather


class TopKBucket:
    """A bucket of gradients of which only the largest elements are sent. Of equal elements, the first are sent."""

    def __init__(self, members: Sequence[NamedParameter], *, how: Compression) -> None:
        self._parameters = [member.parameter for member in members]
        first = self._parameters[0]
        dtype = accumulation_dtype(first.dtype)
        shapes = {member.name: member.parameter.shape for member in members}
        self.errors = ResidualBuffers(shapes, dtype=dtype, device=first.device)
        self._sizes = [p.numel() for p in self._parameters]
        self._counts = [how.picked(size) for size in self._sizes]
        self._sum = torch.zeros(sum(self._sizes), dtype=dtype, device=first.device)
        self._index = torch.int32 if sum(self._sizes) < 1 << 31 else torch.int64
        self._came = self._mine = self._sum
        self._wait: Callable[[], object] | None = None

    @property
    def memories(self) -> tuple[ResidualBuffers, ...]:
        """Return the buffers that persist from step to step."""
        return (self.errors,)

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends for this bucket."""
        return (ranks - 1) * sum(self._counts) * (self._index.itemsize + self._sum.itemsize)

    def launch(self, world: World) -> None:
        """Select the largest elements, and send them."""
        self.errors.corrected([torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters])
        found = self.errors.next_flat
        places = torch.cat(list(self._picked(found)))
        values = found[places]
        found[places] = 0.0
        self._mine = torch.cat([places.to(self._index).view(torch.uint8), values.view(torch.uint8)])
        self._came = torch.empty(world.world_size, len(self._mine), dtype=torch.uint8, device=found.device)
        self._wait = start_all_gather(self._mine, out=self._came, world=world)

    def pass_on(self) -> None:
        """Do nothing: there is only one message."""

    def land(self) -> Tensor:
        """Sum all ranks' elements in rank order, and return a number that is finite if every gradient is."""
        assert self._wait is not None
        self._wait()
        self._sum.zero_()
        at = sum(self._counts) * self._index.itemsize
        for row in self._came:
            places, values = row[:at].clone().view(self._index), row[at:].clone().view(self._sum.dtype)
            self._sum.index_add_(0, places.long(), values)
        for parameter, part in zip(self._parameters, self._sum.split(self._sizes), strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)
        return self._sum.sum(dtype=torch.float64)

    def _picked(self, found: Tensor) -> Iterator[Tensor]:
        start = 0
        for part, count in zip(found.split(self._sizes), self._counts, strict=True):
            yield largest_elements(part, count) + start
            start += len(part)


def largest_elements(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` elements of largest magnitude, in order; NaN counts as infinite."""
    if count >= len(values):
        return torch.arange(len(values), device=values.device)
    size = values.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    least = torch.topk(size, count, sorted=False).values.amin()
    places = (size >= least).nonzero().flatten()
    spare = len(places) - count
    if not spare:
        return places
    keep = torch.ones(len(places), dtype=torch.bool, device=values.device)
    keep[(size[places] == least).nonzero().flatten()[-spare:]] = False
    return places[keep]
