"""Exact gradient sums: gradients are added as integers, so the sum is bitwise equal for any order of addition.

Each microbatch's gradient is rounded to a multiple of 2^k, with one k per parameter, and added as int64. For this, the
constant 1.5 * 2^(52+k) is added to the gradient in float64. The bits of this sum minus the bits of the constant, both
read as int64, are the rounded gradient in units of 2^k. So plain torch operations suffice. The exponent k is chosen
from the previous step's largest gradient magnitude over *all* microbatches, so it does not depend on which rank
computed which microbatch.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.errors import RunError
from paceline.parallel.data_parallel.fixed_point import add_rounded_gradient, make_scratch_buffer, write_scaled_sums
from paceline.parallel.data_parallel.reducer import second_gradient_error
from paceline.parallel.gradients.tied_parameters import ExactTies
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets

VALUE_BITS = 51  # a rounded gradient is below 2^51 times 2^k
HEADROOM_BITS = 8  # gradients may grow by a factor of 2^8 before a new exponent is needed
MIN_BITS = 24  # as many bits as a float32
# a float64 has no bit below 2^MIN_EXPONENT, and 1.5 * 2^(52+k) overflows for k above MAX_EXPONENT
MIN_EXPONENT, MAX_EXPONENT = -1074, 971
MAX_MICROBATCHES = 1 << 12  # up to this number, the sums fit in an int64


class FixedPointGrid:
    """The fixed-point grid: the exponent k of each parameter, or None before its first gradient.

    Checkpoints contain `exponents`. `names` are the full model's trainable parameters. Ranks of `extra_worlds` hold
    other parameters. Magnitudes are exchanged with them too, because all ranks rerun a step together. `tied_uses`
    separates a tied weight's gradients by use. Gradients of the ties in `set_ties` are summed over pipeline stages.
    `num_backwards` is the number of backwards of a microbatch on this rank: one for each of its sequence shards. In the
    methods, `largest` is the result of `max_magnitudes`.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        extra_worlds: Sequence[World] = (),
        tied_uses: TiedUses | None = None,
        num_backwards: int = 1,
    ) -> None:
        self.names = list(names)
        self.exponents: list[int | None] = [None] * len(self.names)
        self._extra_worlds = [world for world in extra_worlds if world.world_size > 1]
        self.num_backwards = num_backwards
        self._tied_uses = tied_uses
        self._ties: ExactTies | None = None

    def set_ties(self, ties: ExactTies) -> None:
        """Set the tied parameters, which several pipeline stages hold."""
        self._ties = ties

    def begin(self) -> None:
        """Start a step: drop the tied weights' gradients of an unfinished step."""
        if self._tied_uses is not None:
            self._tied_uses.clear_gradients()

    def close(self) -> None:
        """Remove the hooks on tied weights; no more steps follow."""
        if self._tied_uses is not None:
            self._tied_uses.close()

    def gradients_by_use(self, name: str, gradient: Tensor) -> list[Tensor]:
        """Return the terms of a parameter's gradient in one microbatch: one per use if the weight is tied, else one."""
        return [gradient] if self._tied_uses is None else self._tied_uses.gradients_by_use(name, gradient)

    def sum_over_stages(self, name: str, sums: Tensor) -> Tensor:
        """Return the integer sums over all stages that hold the parameter; these stages call this in the same order."""
        return sums if self._ties is None else self._ties.sum_over_stages(name, sums)

    def max_magnitudes(self, magnitudes: "GradientMagnitudes", worlds: Sequence[World]) -> list[list[float]]:
        """Return `GradientMagnitudes.max_over_ranks` over `worlds` and `extra_worlds`."""
        return magnitudes.max_over_ranks([*worlds, *self._extra_worlds])

    def fits_all(self, largest: Sequence[Sequence[float]]) -> bool:
        """Return whether gradients of these magnitudes all fit the grid; the result is equal on every rank."""
        return all(self.fits(index, magnitude) for index, (magnitude, _) in enumerate(largest))

    def update_exponents(self, largest: Sequence[Sequence[float]]) -> None:
        """Choose all exponents for gradients of these magnitudes.

        Raises:
            RunError: a gradient is too large for any exponent; raised on every rank.
        """
        for index, (name, (magnitude, _)) in enumerate(zip(self.names, largest, strict=True)):
            check_magnitude(name, magnitude)
            self.update_exponent(index, magnitude)

    def fits(self, index: int, magnitude: float) -> bool:
        """Return whether the grid represents a gradient of this magnitude without overflow and with enough bits."""
        exponent = self.exponents[index]
        if magnitude == 0.0 or not math.isfinite(magnitude):
            return True
        if exponent is None:
            return False
        num_bits = math.frexp(magnitude)[1] - exponent
        return num_bits <= VALUE_BITS and (num_bits >= MIN_BITS or exponent == MIN_EXPONENT)

    def update_exponent(self, index: int, magnitude: float) -> None:
        """Choose one parameter's exponent for gradients of this magnitude, with headroom."""
        if magnitude > 0.0 and math.isfinite(magnitude):
            exponent = math.frexp(magnitude)[1] + HEADROOM_BITS - VALUE_BITS
            self.exponents[index] = min(max(exponent, MIN_EXPONENT), MAX_EXPONENT)


class _ExactBucket:
    """A bucket of int64 sums that are all-reduced together."""

    def __init__(self, members: Sequence[NamedParameter], *, device: torch.device, num_backwards: int) -> None:
        self.members = list(members)
        self._num_gradients = len(self.members) * num_backwards
        sizes = [member.parameter.numel() for member in members]
        self.sums = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.member_sums = list(self.sums.split(sizes))
        self.num_ready = 0
        self.wait: Callable[[], object] | None = None

    @property
    def is_full(self) -> bool:
        """Return whether all gradients of the bucket are ready."""
        return self.num_ready == self._num_gradients


class ExactReducer:
    """A reducer that sums integers over microbatches and ranks, overlapped with the last backward.

    `finish` returns False if a gradient did not fit the grid: then the sums are invalid and the step is rerun.
    """

    needs_equal_microbatches = False

    def __init__(self, *, named_parameters: Sequence[NamedParameter], world: World, grid: FixedPointGrid) -> None:
        self._world = world
        self._named_parameters = list(named_parameters)
        self._grid = grid
        self._buckets = [
            _ExactBucket(members, device=world.device, num_backwards=grid.num_backwards)
            for members in make_buckets(named_parameters)
        ]
        self._scratch = make_scratch_buffer(world.device)
        self._magnitudes = GradientMagnitudes(num_parameters=len(grid.names))
        self._has_grad = [False] * len(grid.names)
        self._is_last_microbatch = False
        self._next_bucket = 0
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, member, sums))
            for bucket in self._buckets
            for member, sums in zip(bucket.members, bucket.member_sums, strict=True)
        ]

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        self._magnitudes = GradientMagnitudes(num_parameters=len(self._grid.names))
        self._has_grad = [False] * len(self._grid.names)
        self._is_last_microbatch = False
        self._next_bucket = 0
        self._grid.begin()
        for bucket in self._buckets:
            bucket.num_ready, bucket.wait = 0, None
        for member in self._named_parameters:
            member.parameter.grad = None

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Enable communication for the last microbatch, whose gradients complete this rank's sums."""
        self._is_last_microbatch = last

    def after_backward(self) -> None:
        """Do nothing: the hooks have already added the gradients."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Sum over ranks and set each `.grad`. If a gradient did not fit, set none of them and return False.

        In both cases, choose new exponents from the gradient magnitudes of this step.

        Raises:
            RunError: a gradient is too large for any exponent; raised on every rank.
        """
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        largest = self._grid.max_magnitudes(self._magnitudes, [self._world])
        fits = self._grid.fits_all(largest)
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
            for member, local_sum in zip(bucket.members, bucket.member_sums, strict=True):
                if fits:
                    total = self._grid.sum_over_stages(member.name, local_sum)
                    member.parameter.grad = self._make_gradient(member, total, largest[member.index], divisor)
        self._grid.update_exponents(largest)
        return fits

    def close(self) -> None:
        """Remove the gradient hooks."""
        self._grid.close()
        for handle in self._handles:
            handle.remove()

    def _make_hook(self, bucket: _ExactBucket, member: NamedParameter, sums: Tensor) -> Callable[[Tensor], None]:
        def on_grad_ready(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            if bucket.wait is not None:
                raise second_gradient_error(member.name)
            for term in self._grid.gradients_by_use(member.name, gradient):
                self._accumulate(member, term, sums)
            bucket.num_ready += self._is_last_microbatch
            while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].is_full:
                self._launch_next()

        return on_grad_ready

    def _accumulate(self, member: NamedParameter, gradient: Tensor, sums: Tensor) -> None:
        self._magnitudes.record(member.index, gradient)
        exponent = self._grid.exponents[member.index]
        if exponent is not None:
            is_first = not self._has_grad[member.index]
            add_rounded_gradient(
                gradient.reshape(-1), sums=sums, exponent=exponent, is_first=is_first, scratch=self._scratch
            )
            self._has_grad[member.index] = True

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        for member, sums in zip(bucket.members, bucket.member_sums, strict=True):
            if not self._has_grad[member.index]:
                sums.zero_()
        bucket.wait = self._world.start_all_reduce(bucket.sums)
        self._next_bucket += 1

    def _make_gradient(
        self, member: NamedParameter, sums: Tensor, largest: Sequence[float], divisor: float | Tensor | None
    ) -> Tensor | None:
        """Return the gradient from its integer sums, or None if no rank has one; `largest` is (magnitude, has_grad)."""
        magnitude, has_grad = largest
        if not has_grad:
            return None
        gradient = torch.empty_like(member.parameter, memory_format=torch.contiguous_format)
        exponent = self._grid.exponents[member.index] or 0
        write_scaled_sums(sums, out=gradient, exponent=exponent, divisor=divisor, scratch=self._scratch)
        return gradient if math.isfinite(magnitude) else gradient.fill_(math.nan)


class GradientMagnitudes:
    """The largest gradient magnitudes of a step, over all microbatches."""

    def __init__(self, *, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self._extremes: list[tuple[int, Tensor, Tensor]] = []  # index of the parameter, minimum, maximum

    def record(self, index: int, gradient: Tensor) -> None:
        """Record the minimum and maximum of one parameter's gradient in one microbatch."""
        if gradient.numel():
            self._extremes.append((index, *torch.aminmax(gradient)))

    def max_over_ranks(self, worlds: Sequence[World]) -> list[list[float]]:
        """Return for each parameter a list of two numbers, as maxima over all microbatches and ranks.

        They are the largest magnitude of the parameter's gradient, and 1 if it got a gradient, else 0. NaN counts as
        infinite, because the maximum over ranks would drop it.
        """
        rows = torch.zeros(self._num_parameters, 2, dtype=torch.float64)
        if self._extremes:
            lows = torch.stack([low.double() for _, low, _ in self._extremes])
            highs = torch.stack([high.double() for _, _, high in self._extremes])
            magnitudes = torch.maximum(-lows, highs).nan_to_num(nan=math.inf).tolist()
            for (index, _, _), magnitude in zip(self._extremes, magnitudes, strict=True):
                rows[index, 0] = max(float(rows[index, 0]), magnitude)
                rows[index, 1] = 1.0
        for world in worlds:
            rows = world.all_reduce(rows.to(world.device), op="max")
        result: list[list[float]] = rows.tolist()
        return result


def check_magnitude(name: str, magnitude: float) -> None:
    """Refuse a gradient that is too large for any exponent.

    Raises:
        RunError: the magnitude is too large; raised on every rank, because all ranks have the same magnitudes.
    """
    if math.isfinite(magnitude) and math.frexp(magnitude)[1] > MAX_EXPONENT + VALUE_BITS:
        raise RunError(
            f"the gradient of {name} reaches {magnitude:.3g}: exact mode adds values below "
            f"2**{MAX_EXPONENT + VALUE_BITS}.",
            cause="a learning rate that is too high, a loss that was scaled up, or a division by almost zero",
            hint="a smaller --job.lr or loss, or leave --train.exact out",
        )


def no_grid_error(*, step: int, num_tries: int) -> RunError:
    """Return the error for a step that was computed `num_tries` times, each time with other gradient magnitudes."""
    return RunError(
        f"step {step}: exact mode found no grid: this step was computed {num_tries} times, and each time its gradients "
        "had a different magnitude.",
        cause="a forward or a loss that gives different values for the same batch: a counter, a clock",
        hint="return the same values for the same weights and batch, or leave --train.exact out",
    )
