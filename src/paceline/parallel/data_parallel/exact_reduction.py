"""Exact gradient sums: gradients are added as integers, so the sum is bitwise equal for any order of addition.

Each microbatch's gradient is rounded to a multiple of 2^k, with one k per parameter, and added as int64. Adding
1.5 * 2^(52+k) to a float64 leaves the rounded value in its low bits, so plain torch operations suffice; then the
bits of the constant are subtracted. The exponent k is chosen from the previous step's largest gradient magnitude over
*all* microbatches, so it does not depend on which rank computed which microbatch.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.errors import RunError
from paceline.parallel.data_parallel.fixed_point import add_rounded, from_sums, scratch_on
from paceline.parallel.data_parallel.reducer import second_gradient
from paceline.parallel.gradients.tied_parameters import ExactTies
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets

VALUE_BITS = 51
HEADROOM_BITS = 8
LEAST_BITS = 24
# a float64 has no bit below 2^MIN_EXPONENT, and 1.5 * 2^(52+k) overflows for k above MAX_EXPONENT
LOWEST, HIGHEST = -1074, 971
MOST_MICROBATCHES = 1 << 12


class FixedPointGrid:
    """The fixed-point exponent k of each parameter, None before its first gradient; checkpoints contain it.

    `names` are the full model's trainable parameters. Ranks of `extra_worlds` hold other parameters; magnitudes are
    exchanged with them too, because all ranks rerun a step together. `tied_uses` separates a tied weight's gradients
    by use; the ties set by `set_ties` are summed over pipeline stages.
    """

    def __init__(self, *, names: Sequence[str], others: Sequence[World] = (), uses: TiedUses | None = None) -> None:
        self.names = list(names)
        self.exponents: list[int | None] = [None] * len(self.names)
        self._others = [world for world in others if world.world_size > 1]
        self._uses = uses
        self._ties: ExactTies | None = None

    def tie(self, ties: ExactTies) -> None:
        """Set the tied parameters, which several pipeline stages hold."""
        self._ties = ties

    def begin(self) -> None:
        """Start a step: drop the tied weights' gradients of an unfinished step."""
        if self._uses is not None:
            self._uses.forget()

    def close(self) -> None:
        """Remove the hooks on tied weights; no more steps follow."""
        if self._uses is not None:
            self._uses.close()

    def summands(self, name: str, gradient: Tensor) -> list[Tensor]:
        """Return the terms of a parameter's gradient in one microbatch: one per use of a tied weight, else only one."""
        return [gradient] if self._uses is None else self._uses.summands(name, gradient)

    def over_stages(self, name: str, sums: Tensor) -> Tensor:
        """Return the integer sums over all stages that hold the parameter; each stage calls this, in the same order."""
        return sums if self._ties is None else self._ties.added(name, sums)

    def joint(self, sizes: "GradientMagnitudes", worlds: Sequence[World]) -> list[list[float]]:
        """Return `GradientMagnitudes.max_over_ranks` over `worlds` and `extra_worlds`."""
        return sizes.joint([*worlds, *self._others])

    def holds(self, largest: Sequence[Sequence[float]]) -> bool:
        """Return whether gradients of these magnitudes all fit the grid; every rank gets the same result."""
        return all(self.fits(index, size) for index, (size, _) in enumerate(largest))

    def move(self, largest: Sequence[Sequence[float]]) -> None:
        """Choose all exponents for gradients of these magnitudes.

        Raises:
            RunError: a gradient is too large for any exponent; raised on every rank.
        """
        for index, (name, (size, _)) in enumerate(zip(self.names, largest, strict=True)):
            check_size(name, size)
            self.follow(index, size)

    def fits(self, index: int, largest: float) -> bool:
        """Return whether the grid represents a gradient of this magnitude without overflow and with enough bits."""
        exponent = self.exponents[index]
        if largest == 0.0 or not math.isfinite(largest):
            return True
        if exponent is None:
            return False
        top = math.frexp(largest)[1]
        return top - exponent <= VALUE_BITS and (top - exponent >= LEAST_BITS or exponent == LOWEST)

    def follow(self, index: int, largest: float) -> None:
        """Choose one parameter's exponent for gradients of this magnitude, with headroom."""
        if largest > 0.0 and math.isfinite(largest):
            top = math.frexp(largest)[1]
            self.exponents[index] = min(max(top + HEADROOM_BITS - VALUE_BITS, LOWEST), HIGHEST)


class _Bucket:
    """A bucket of int64 sums that are all-reduced together."""

    def __init__(self, members: Sequence[NamedParameter], *, device: torch.device) -> None:
        self.members = list(members)
        sizes = [member.parameter.numel() for member in members]
        self.sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.parts = list(self.sums.split(sizes))
        self.ready = 0
        self.wait: Callable[[], object] | None = None

    @property
    def is_full(self) -> bool:
        """Return whether all gradients of the bucket are ready."""
        return self.ready == len(self.parts)


class ExactReducer:
    """A reducer that sums integers over microbatches and ranks, overlapped with the last backward.

    `finish` returns False if a gradient did not fit the grid: then the sums are invalid and the step is rerun.
    """

    needs_equal_microbatches = False

    def __init__(self, *, named: Sequence[NamedParameter], world: World, grid: FixedPointGrid) -> None:
        self._world = world
        self._named = list(named)
        self._grid = grid
        self._buckets = [_Bucket(members, device=world.device) for members in make_buckets(named)]
        self._scratch = scratch_on(world.device)
        self._sizes = GradientMagnitudes(num_parameters=len(grid.names))
        self._touched = [False] * len(grid.names)
        self._armed = False
        self._next = 0
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(self._hook(bucket, member, part))
            for bucket in self._buckets
            for member, part in zip(bucket.members, bucket.parts, strict=True)
        ]

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        self._sizes = GradientMagnitudes(num_parameters=len(self._grid.names))
        self._touched = [False] * len(self._grid.names)
        self._armed = False
        self._next = 0
        self._grid.begin()
        for bucket in self._buckets:
            bucket.ready, bucket.wait = 0, None
        for member in self._named:
            member.parameter.grad = None

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """Enable communication for the last microbatch, whose gradients complete this rank's sums."""
        self._armed = last

    def after_backward(self) -> None:
        """Do nothing: the hooks have already added the gradients."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Sum over ranks and set each `.grad`; if a gradient did not fit, choose new exponents and return False.

        Raises:
            RunError: a gradient is too large for any exponent; raised on every rank.
        """
        while self._next < len(self._buckets):
            self._launch_next()
        largest = self._grid.joint(self._sizes, [self._world])
        fits = self._grid.holds(largest)
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
            for member, part in zip(bucket.members, bucket.parts, strict=True):
                if fits:
                    total = self._grid.over_stages(member.name, part)
                    member.parameter.grad = self._gradient(member, total, largest[member.index], divisor)
        self._grid.move(largest)
        return fits

    def close(self) -> None:
        """Remove the gradient hooks."""
        self._grid.close()
        for handle in self._handles:
            handle.remove()

    def _hook(self, bucket: _Bucket, member: NamedParameter, part: Tensor) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            if bucket.wait is not None:
                raise second_gradient(member.name)
            for summand in self._grid.summands(member.name, gradient):
                self._take(member, summand, part)
            bucket.ready += self._armed
            while self._next < len(self._buckets) and self._buckets[self._next].is_full:
                self._launch_next()

        return add

    def _take(self, member: NamedParameter, gradient: Tensor, part: Tensor) -> None:
        self._sizes.see(member.index, gradient)
        exponent = self._grid.exponents[member.index]
        if exponent is not None:
            first = not self._touched[member.index]
            add_rounded(gradient.reshape(-1), to=part, exponent=exponent, first=first, scratch=self._scratch)
            self._touched[member.index] = True

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        for member, part in zip(bucket.members, bucket.parts, strict=True):
            if not self._touched[member.index]:
                part.zero_()
        bucket.wait = self._world.start_all_reduce(bucket.sums)
        self._next += 1

    def _gradient(
        self, member: NamedParameter, part: Tensor, seen: Sequence[float], divisor: float | Tensor | None
    ) -> Tensor | None:
        size, touched = seen
        if not touched:
            return None
        gradient = torch.empty_like(member.parameter, memory_format=torch.contiguous_format)
        exponent = self._grid.exponents[member.index] or 0
        from_sums(part, to=gradient, exponent=exponent, divisor=divisor, scratch=self._scratch)
        return gradient if math.isfinite(size) else gradient.fill_(math.nan)


class GradientMagnitudes:
    """The largest gradient magnitudes of a step, over all microbatches."""

    def __init__(self, *, num_parameters: int) -> None:
        self._num = num_parameters
        self._seen: list[tuple[int, Tensor, Tensor]] = []

    def see(self, index: int, gradient: Tensor) -> None:
        """Record the minimum and maximum of one parameter's gradient in one microbatch."""
        if gradient.numel():
            self._seen.append((index, *torch.aminmax(gradient)))

    def joint(self, worlds: Sequence[World]) -> list[list[float]]:
        """Return for each parameter the largest magnitude over all microbatches, and 1 if it got a gradient, else 0.

        NaN counts as infinite, because MAX over ranks would drop it.
        """
        rows = torch.zeros(self._num, 2, dtype=torch.float64)
        if self._seen:
            lows = torch.stack([low.double() for _, low, _ in self._seen])
            highs = torch.stack([high.double() for _, _, high in self._seen])
            sizes = torch.maximum(-lows, highs).nan_to_num(nan=math.inf).tolist()
            for (index, _, _), size in zip(self._seen, sizes, strict=True):
                rows[index, 0] = max(float(rows[index, 0]), size)
                rows[index, 1] = 1.0
        for world in worlds:
            rows = world.all_reduce(rows.to(world.device), op="max")
        joint: list[list[float]] = rows.tolist()
        return joint


def check_size(name: str, largest: float) -> None:
    """Refuse a gradient that is too large for any exponent.

    Raises:
        RunError: the magnitude is too large; raised on every rank, because all ranks have the same magnitudes.
    """
    if math.isfinite(largest) and math.frexp(largest)[1] > HIGHEST + VALUE_BITS:
        raise RunError(
            f"the gradient of {name} reaches {largest:.3g}: exact mode adds values below 2**{HIGHEST + VALUE_BITS}.",
            cause="a learning rate that is too high, a loss that was scaled up, or a division by almost zero",
            hint="a smaller --job.lr or loss, or leave --train.exact out",
        )


def no_grid(*, step: int, attempts: int) -> RunError:
    """Return the error for a step whose gradient magnitudes differed in each attempt."""
    return RunError(
        f"step {step}: exact mode found no grid: gradients had a different magnitude in each of {attempts} runs.",
        cause="a forward or a loss that gives different values for the same batch: a counter, a clock",
        hint="return the same values for the same weights and batch, or leave --train.exact out",
    )
