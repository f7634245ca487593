"""Exact mode's sum: gradients added as integers, so that no grouping over ranks or steps changes a bit.

Each microbatch's gradient is rounded to a grid 2^k, one k per parameter, and added as int64. Adding
1.5 * 2^(52+k) to a float64 leaves the rounded value in its low bits, so that plain torch operations do it; the
constant's own bits are taken off once at the end, modulo 2^64. The grid follows the last step's largest
gradient over *all* microbatches, which does not depend on who computed them.
"""

import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.place.units import Named
from paceline.world import World

VALUE_BITS = 51
HEADROOM_BITS = 8
LEAST_BITS = 24
MOST_MICROBATCHES = 1 << 12
_CHUNK = 1 << 16
_WRAP = 1 << 64


class Grid:
    """The exponent k of every parameter's grid; None before a first gradient was seen. Saved with the run."""

    def __init__(self, *, num_parameters: int) -> None:
        self.exponents: list[int | None] = [None] * num_parameters

    def fits(self, index: int, largest: float) -> bool:
        """Whether a gradient of this size is held whole and finely enough."""
        exponent = self.exponents[index]
        if largest == 0.0 or not math.isfinite(largest):
            return True
        if exponent is None:
            return False
        top = math.frexp(largest)[1]
        return LEAST_BITS <= top - exponent <= VALUE_BITS

    def follow(self, index: int, largest: float) -> None:
        """Set the grid for gradients of this size, with room to grow."""
        if largest > 0.0 and math.isfinite(largest):
            top = math.frexp(largest)[1]
            self.exponents[index] = max(top + HEADROOM_BITS - VALUE_BITS, -1000)


class ExactReducer:
    """The integer sum over microbatches and ranks. `finish` says whether the grid held the gradients."""

    def __init__(self, *, named: Sequence[Named], world: World, grid: Grid) -> None:
        self._world = world
        self._named = list(named)
        self._grid = grid
        sizes = [member.parameter.numel() for member in named]
        self._sums = torch.zeros(sum(sizes), dtype=torch.int64, device=world.device)
        parts = list(self._sums.split(sizes)) if sizes else []
        self._parts = parts
        self._scratch = torch.empty(_CHUNK, dtype=torch.float64, device=world.device)
        self._seen: list[tuple[int, Tensor, Tensor]] = []
        self._added = [0] * len(sizes)
        self._handles = [member.parameter.register_post_accumulate_grad_hook(self._hook(member)) for member in named]

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self._seen = []
        self._added = [0] * len(self._named)
        for member in self._named:
            member.parameter.grad = None

    def before_backward(self, *, last: bool) -> None:
        """Nothing to prepare: each microbatch is added by itself."""

    def after_backward(self) -> None:
        """Nothing to collect: the hooks have."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Add over ranks; leave gradients in `.grad`, or set a better grid and answer False."""
        largest = self._joint_largest()
        fits = all(self._grid.fits(member.index, largest[member.index][0]) for member in self._named)
        if fits:
            self._take_off_constants()
            self._world.all_reduce(self._sums)
            self._write_gradients(largest, divisor)
        for member in self._named:
            self._grid.follow(member.index, largest[member.index][0])
        return fits

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, member: Named) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            self._seen.append((member.index, *torch.aminmax(gradient)))
            exponent = self._grid.exponents[member.index]
            if exponent is not None:
                first = self._added[member.index] == 0
                self._added[member.index] += 1
                self._add(self._parts[member.index], gradient.reshape(-1), magic(exponent), first=first)

        return add

    def _add(self, sums: Tensor, gradient: Tensor, constant: float, *, first: bool) -> None:
        """In pieces that stay in the cache; the step's first gradient is written over the last step's sum."""
        for start in range(0, gradient.numel(), _CHUNK):
            piece = gradient[start : start + _CHUNK]
            scratch = self._scratch[: piece.numel()]
            scratch.copy_(piece)
            scratch.add_(constant)
            target = sums[start : start + _CHUNK]
            if first:
                target.copy_(scratch.view(torch.int64))
            else:
                target.add_(scratch.view(torch.int64))

    def _joint_largest(self) -> list[list[float]]:
        """For each parameter the largest magnitude over all microbatches, and 1 once a gradient came.

        NaN counts as infinite: MAX over ranks would drop it.
        """
        rows = torch.zeros(len(self._named), 2, dtype=torch.float64)
        if self._seen:
            lows = torch.stack([low for _, low, _ in self._seen])
            highs = torch.stack([high for _, _, high in self._seen])
            sizes = torch.maximum(-lows, highs).double().nan_to_num(nan=math.inf).tolist()
            for (index, _, _), size in zip(self._seen, sizes, strict=True):
                rows[index, 0] = max(float(rows[index, 0]), size)
                rows[index, 1] = 1.0
        joint: list[list[float]] = self._world.all_reduce(rows.to(self._world.device), op="max").tolist()
        return joint

    def _take_off_constants(self) -> None:
        for member, part in zip(self._named, self._parts, strict=True):
            exponent, added = self._grid.exponents[member.index], self._added[member.index]
            if exponent is not None and added:
                part.sub_(wrapped(added * bits(magic(exponent))))
            else:
                part.zero_()

    def _write_gradients(self, largest: list[list[float]], divisor: float | Tensor | None) -> None:
        for member, part in zip(self._named, self._parts, strict=True):
            size, touched = largest[member.index]
            if not touched:
                member.parameter.grad = None
                continue
            value = part.double().mul_(2.0 ** (self._grid.exponents[member.index] or 0))
            if not math.isfinite(size):
                value.fill_(math.nan)
            if divisor is not None:
                value.div_(divisor)
            member.parameter.grad = value.to(member.parameter.dtype).view(member.parameter.shape)


def magic(exponent: int) -> float:
    """The constant whose addition rounds a float64 to multiples of 2^exponent."""
    return math.ldexp(1.5, 52 + exponent)


def bits(value: float) -> int:
    """The bits of a float64 as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def wrapped(value: int) -> int:
    """An integer modulo 2^64, as a signed 64-bit one."""
    value %= _WRAP
    return value - _WRAP if value >= _WRAP // 2 else value
