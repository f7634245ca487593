"""Gradient reduce-scatter: each rank keeps only its rows of the sums (ZeRO-2 and -3; Rajbhandari et al., 2020).

A hook copies each gradient to the buffer of its bucket as soon as backward has computed it. A full bucket is
reduce-scattered at once, while backward continues, and its buffer is freed when this is done. The hook is registered
on the parameter that autograd writes to, so it works for unsharded parameters (ZeRO-2) and for those that
`fully_shard` gathers (ZeRO-3). In exact mode the messages are int64 sums on the grid.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid, GradientMagnitudes
from paceline.parallel.data_parallel.fixed_point import add_rounded, from_sums, scratch_on
from paceline.parallel.data_parallel.reducer import second_gradient
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets, passing_bytes
from paceline.parallel.sharding.execution_order_check import UnitOrderCheck
from paceline.parallel.sharding.flat_buffer import FlatBufferLayout, start_reduce_scatter
from paceline.parallel.sharding.row_shards import RowShard, RowSplit
from paceline.torch_internals.private_api import add_all, copy_all

IN_FLIGHT = 2


class _Unit:
    """Gradients that are reduce-scattered together, and this rank's rows of their sums over the microbatches."""

    def __init__(self, packing: FlatBufferLayout, *, place: int, dtype: torch.dtype, device: torch.device) -> None:
        self.packing = packing
        self.place = place
        self.ready = 0
        self.launched = False
        self.buffer: Tensor | None = None
        self._sizes = [cut.numel(place) for cut in packing.cuts]
        self._dtype, self._device = dtype, device

    @cached_property
    def sums(self) -> Tensor:
        """This rank's gradient sums, allocated in the first step, so that evaluation does not need this memory."""
        return torch.zeros(sum(self._sizes), dtype=self._dtype, device=self._device)

    @cached_property
    def parts(self) -> list[Tensor]:
        """The views of `grad_sums`, one per parameter."""
        return list(self.sums.split(self._sizes))

    def open(self) -> Tensor:
        """Return the buffer for the microbatch's gradients; allocate it if needed."""
        if self.buffer is None:
            self.buffer = self.packing.empty(dtype=self._dtype, device=self._device)
        return self.buffer

    def send(self, world: World, *, first: bool) -> Callable[[], None]:
        """Start the reduce-scatter; return a function that waits for it and adds the result to the sums."""
        buffer, self.buffer = self.open(), None
        out = torch.empty(self.packing.chunk, dtype=buffer.dtype, device=buffer.device)
        wait = start_reduce_scatter(buffer, out=out, world=world)

        def land() -> None:
            wait()
            (copy_all if first else add_all)(self.parts, self.packing.pieces(out, place=self.place))

        return land


class ScatterReducer:
    """A reducer that sums this rank's rows of the gradients over microbatches and ranks into the row shards' `.grad`.

    `leaf_parameters` are the parameters that autograd writes to, one per row shard. Rows are split over the ranks of
    `shard_world`; the ranks of `replica_world` hold the same rows. All ranks must run backward equally often.
    `order_check` checks the order in which the ranks gather units.
    """

    def __init__(
        self,
        *,
        shares: Sequence[RowShard],
        sources: Sequence[nn.Parameter],
        cut: Mapping[str, RowSplit],
        shard: World,
        replicas: World | None = None,
        grid: FixedPointGrid | None = None,
        order: UnitOrderCheck | None = None,
    ) -> None:
        self._shares = list(shares)
        self._sources = list(sources)
        self._shard = shard
        self._worlds = [world for world in (shard, replicas) if world is not None and world.world_size > 1]
        self._replicas = replicas if replicas is not None and replicas.world_size > 1 else None
        self._grid = grid
        self.order = order
        self._scratch = scratch_on(shard.device)
        named = [NamedParameter(index=i, name=s.name, parameter=s.holder) for i, s in enumerate(shares)]
        units = make_buckets(named, bucket_bytes=passing_bytes(shard))
        self._units = [self._unit(members, cut) for members in units]
        self._forget()
        self._handles = [
            self._sources[member.index].register_post_accumulate_grad_hook(self._hook(unit, position, member))
            for unit in self._units
            for position, member in enumerate(unit.packing.members)
        ]

    @property
    def needs_equal_microbatches(self) -> bool:
        """Return whether a rank without samples must run backward too, with `counts=False`."""
        return self._shard.world_size > 1

    def begin(self) -> None:
        """Clear the gradients of the previous step, and wait for its messages if it was dropped."""
        self._land(keep=0)
        self._forget()
        if self._grid is not None:
            self._grid.begin()
        for share, source in zip(self._shares, self._sources, strict=True):
            share.parameter.grad = None
            source.grad = None

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """Prepare for a microbatch's backward; with `counts=False` it contributes zeros."""
        self._counts = counts
        self._next = 0
        for unit in self._units:
            unit.ready, unit.launched = 0, False
        self._taken = [False] * len(self._shares)

    def after_backward(self) -> None:
        """Launch the buckets that backward did not fill."""
        while self._next < len(self._units):
            self._launch_next()
        self._rounds += 1

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Set the row shards' `.grad`. If a gradient did not fit exact mode's grid, choose new exponents, return False.

        Raises:
            RunError: a gradient is too large for any exponent; raised on every rank.
            DesyncError: the ranks have gathered different units.
        """
        if self.order is not None:
            self.order.compare()
        self._land(keep=0)
        waits = []
        for unit in self._units:
            if self._rounds == 0:
                unit.sums.zero_()
            if self._replicas is not None and unit.sums.numel():
                waits.append(self._replicas.start_all_reduce(unit.sums))
        for wait in waits:
            wait()
        return self._finish_exact(self._grid, divisor) if self._grid is not None else self._finish(divisor)

    def close(self) -> None:
        """Remove the gradient hooks."""
        if self._grid is not None:
            self._grid.close()
        for handle in self._handles:
            handle.remove()

    def _unit(self, members: Sequence[NamedParameter], cut: Mapping[str, RowSplit]) -> _Unit:
        packing = FlatBufferLayout(members, cut=cut, places=self._shard.world_size)
        dtype = members[0].parameter.dtype if self._grid is None else torch.int64
        return _Unit(packing, place=self._shard.rank, dtype=dtype, device=self._shard.device)

    def _forget(self) -> None:
        self._rounds = 0
        self._next = 0
        self._counts = True
        self._under_way: list[Callable[[], None]] = []
        self._taken = [False] * len(self._shares)
        self._touched = [False] * len(self._shares)
        self._sizes = GradientMagnitudes(num_parameters=0 if self._grid is None else len(self._grid.names))
        for unit in self._units:
            unit.buffer = None

    def _hook(self, unit: _Unit, position: int, member: NamedParameter) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            if unit.launched or self._taken[member.index]:
                raise second_gradient(member.name)
            self._taken[member.index] = True
            if self._counts:
                self._touched[member.index] = True
                self._put(unit, position, member, gradient)
            unit.ready += 1
            while self._next < len(self._units) and self._units[self._next].ready == len(self._units[self._next].parts):
                self._launch_next()

        return take

    def _put(self, unit: _Unit, position: int, member: NamedParameter, gradient: Tensor) -> None:
        if self._grid is not None:
            self._put_rounded(unit, position, member, self._grid.summands(member.name, gradient), self._grid)
        else:
            pairs = unit.packing.pairs(position, unit.open(), gradient.contiguous())
            copy_all([target for target, _ in pairs], [rows for _, rows in pairs])

    def _put_rounded(
        self, unit: _Unit, position: int, member: NamedParameter, summands: Sequence[Tensor], grid: FixedPointGrid
    ) -> None:
        index = self._shares[member.index].index
        exponent = grid.exponents[index]
        for number, gradient in enumerate(summands):
            self._sizes.see(index, gradient)
            if exponent is None:
                continue
            for target, rows in unit.packing.by_place(position, unit.open(), gradient):
                add_rounded(rows, to=target, exponent=exponent, first=number == 0, scratch=self._scratch)

    def _launch_next(self) -> None:
        unit = self._units[self._next]
        self._land(keep=IN_FLIGHT - 1)
        self._under_way.append(unit.send(self._shard, first=self._rounds == 0))
        unit.launched = True
        self._next += 1

    def _land(self, *, keep: int) -> None:
        while len(self._under_way) > keep:
            self._under_way.pop(0)()

    def _finish(self, divisor: float | Tensor | None) -> bool:
        flags = torch.ones(len(self._shares), device=self._shard.device)
        absent = [index for index, touched in enumerate(self._touched) if not touched]
        if absent:
            flags[absent] = 0.0
        for world in self._worlds:
            world.all_reduce(flags, op="max")
        for unit in self._units:
            if divisor is not None:
                unit.sums.div_(divisor)
            for member, part in zip(unit.packing.members, unit.parts, strict=True):
                if self._touched[member.index] or flags[member.index]:
                    parameter = self._shares[member.index].parameter
                    parameter.grad = part.view(parameter.shape).to(parameter.device)
        return True

    def _finish_exact(self, grid: FixedPointGrid, divisor: float | Tensor | None) -> bool:
        largest = grid.joint(self._sizes, self._worlds)
        fits = grid.holds(largest)
        for unit in self._units if fits else ():
            for member, part in zip(unit.packing.members, unit.parts, strict=True):
                share = self._shares[member.index]
                size, touched = largest[share.index]
                total = grid.over_stages(share.name, part)
                if touched:
                    self._leave(share.parameter, total, size, grid.exponents[share.index] or 0, divisor)
        grid.move(largest)
        return fits

    def _leave(
        self, parameter: nn.Parameter, part: Tensor, size: float, exponent: int, divisor: float | Tensor | None
    ) -> None:
        gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=part.device)
        from_sums(part, to=gradient, exponent=exponent, divisor=divisor, scratch=self._scratch)
        gradient = gradient if math.isfinite(size) else gradient.fill_(math.nan)
        parameter.grad = gradient.to(parameter.device)
