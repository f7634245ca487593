"""Reduce-scatter gradients: each rank keeps only its rows of the sums (ZeRO-2 and -3; Rajbhandari et al., 2020).

A hook copies each gradient to the buffer of its bucket as soon as backward has computed it. When a bucket has all its
gradients, it is reduce-scattered while backward continues, and then its buffer is freed. The hook is registered on the
parameter that autograd writes to. So it works for unsharded parameters (ZeRO-2) and for those that `fully_shard`
gathers (ZeRO-3). In exact mode, integers on the fixed-point grid are summed instead of floating-point gradients.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid, GradientMagnitudes
from paceline.parallel.data_parallel.fixed_point import add_rounded_gradient, make_scratch_buffer, write_scaled_sums
from paceline.parallel.data_parallel.reducer import second_gradient_error
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets, transient_bucket_bytes
from paceline.parallel.sharding.execution_order_check import UnitOrderCheck
from paceline.parallel.sharding.flat_buffer import FlatBufferLayout, start_reduce_scatter
from paceline.parallel.sharding.row_shards import RowShard, RowSplit
from paceline.torch_internals.private_api import add_all, copy_all

MAX_IN_FLIGHT = 2


class _ScatterBucket:
    """Gradients that are reduce-scattered together, and this rank's rows of their sums over the microbatches."""

    def __init__(self, layout: FlatBufferLayout, *, shard_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.shard_rank = shard_rank
        self.num_ready = 0
        self.is_launched = False
        self.buffer: Tensor | None = None
        self._sizes = [split.numel(shard_rank) for split in layout.row_splits]
        self._dtype, self._device = dtype, device

    @cached_property
    def grad_sums(self) -> Tensor:
        """This rank's gradient sums, allocated in the first step, so that evaluation does not need this memory."""
        return torch.zeros(sum(self._sizes), dtype=self._dtype, device=self._device)

    @cached_property
    def member_sums(self) -> list[Tensor]:
        """The views of `grad_sums`, one per parameter."""
        return list(self.grad_sums.split(self._sizes))

    def get_buffer(self) -> Tensor:
        """Return the buffer for the microbatch's gradients; allocate it if needed."""
        if self.buffer is None:
            self.buffer = self.layout.allocate(dtype=self._dtype, device=self._device)
        return self.buffer

    def launch(self, world: World, *, is_first: bool) -> Callable[[], None]:
        """Start the reduce-scatter; return a function that waits for it and adds the result to the sums.

        In the first microbatch (`is_first`), the result replaces the sums.
        """
        buffer, self.buffer = self.get_buffer(), None
        out = torch.empty(self.layout.chunk_numel, dtype=buffer.dtype, device=buffer.device)
        wait = start_reduce_scatter(buffer, out=out, world=world)

        def finish() -> None:
            wait()
            (copy_all if is_first else add_all)(
                self.member_sums, self.layout.member_views(out, shard_rank=self.shard_rank)
            )

        return finish


class ScatterReducer:
    """A reducer that sums this rank's rows of the gradients over microbatches and ranks into the row shards' `.grad`.

    `leaf_parameters` are the parameters that autograd writes to, one per row shard. Rows are split over the ranks of
    `shard_world`; the ranks of `replica_world` hold the same rows. All ranks must run backward equally often.
    `order_check` checks the order in which the ranks gather units.
    """

    def __init__(
        self,
        *,
        row_shards: Sequence[RowShard],
        leaf_parameters: Sequence[nn.Parameter],
        row_splits: Mapping[str, RowSplit],
        shard_world: World,
        replica_world: World | None = None,
        grid: FixedPointGrid | None = None,
        order_check: UnitOrderCheck | None = None,
    ) -> None:
        self._row_shards = list(row_shards)
        self._leaf_parameters = list(leaf_parameters)
        self._shard_world = shard_world
        self._worlds = [world for world in (shard_world, replica_world) if world is not None and world.world_size > 1]
        self._replica_world = replica_world if replica_world is not None and replica_world.world_size > 1 else None
        self._grid = grid
        self._num_backwards_per_microbatch = 1 if grid is None else grid.num_backwards
        self.order_check = order_check
        self._scratch = make_scratch_buffer(shard_world.device)
        named_parameters = [
            NamedParameter(index=i, name=s.name, parameter=s.model_parameter) for i, s in enumerate(row_shards)
        ]
        buckets = make_buckets(named_parameters, bucket_bytes=transient_bucket_bytes(shard_world))
        self._buckets = [self._make_bucket(members, row_splits) for members in buckets]
        self._reset()
        self._handles = [
            self._leaf_parameters[member.index].register_post_accumulate_grad_hook(
                self._make_hook(bucket, position, member)
            )
            for bucket in self._buckets
            for position, member in enumerate(bucket.layout.members)
        ]

    @property
    def needs_equal_microbatches(self) -> bool:
        """Return whether a rank without samples must run backward too, with `has_samples=False`."""
        return self._shard_world.world_size > 1

    def begin(self) -> None:
        """Clear the gradients of the previous step; if that step was dropped, wait for its collectives first."""
        self._finish_pending(max_pending=0)
        self._reset()
        if self._grid is not None:
            self._grid.begin()
        for row_shard, leaf in zip(self._row_shards, self._leaf_parameters, strict=True):
            row_shard.parameter.grad = None
            leaf.grad = None

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Prepare for a microbatch's backward; with `has_samples=False`, this rank contributes zeros."""
        self._has_samples = has_samples
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.num_ready, bucket.is_launched = 0, False
        self._num_gradients = [0] * len(self._row_shards)

    def after_backward(self) -> None:
        """Launch the buckets that backward did not fill."""
        while self._next_bucket < len(self._buckets):
            self._launch_next()
        self._num_backwards += 1

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Set the row shards' `.grad` to the sums divided by `divisor`, and return True.

        If a gradient did not fit the grid of exact mode, choose new exponents and return False instead.

        Raises:
            RunError: a gradient is too large for any exponent; raised on every rank.
            DesyncError: the ranks have gathered different units.
        """
        if self.order_check is not None:
            self.order_check.compare()
        self._finish_pending(max_pending=0)
        waits = []
        for bucket in self._buckets:
            if self._num_backwards == 0:
                bucket.grad_sums.zero_()
            if self._replica_world is not None and bucket.grad_sums.numel():
                waits.append(self._replica_world.start_all_reduce(bucket.grad_sums))
        for wait in waits:
            wait()
        return self._finish_exact(self._grid, divisor) if self._grid is not None else self._finish(divisor)

    def close(self) -> None:
        """Remove the gradient hooks."""
        if self._grid is not None:
            self._grid.close()
        for handle in self._handles:
            handle.remove()

    def _make_bucket(self, members: Sequence[NamedParameter], row_splits: Mapping[str, RowSplit]) -> _ScatterBucket:
        layout = FlatBufferLayout(members, row_splits=row_splits, num_shards=self._shard_world.world_size)
        dtype = members[0].parameter.dtype if self._grid is None else torch.int64
        return _ScatterBucket(layout, shard_rank=self._shard_world.rank, dtype=dtype, device=self._shard_world.device)

    def _reset(self) -> None:
        self._num_backwards = 0
        self._next_bucket = 0
        self._has_samples = True
        self._pending: list[Callable[[], None]] = []
        self._num_gradients = [0] * len(self._row_shards)  # of each parameter in this microbatch
        self._has_grad = [False] * len(self._row_shards)
        self._magnitudes = GradientMagnitudes(num_parameters=0 if self._grid is None else len(self._grid.names))
        for bucket in self._buckets:
            bucket.buffer = None

    def _make_hook(self, bucket: _ScatterBucket, position: int, member: NamedParameter) -> Callable[[Tensor], None]:
        def on_grad_ready(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            if bucket.is_launched or self._num_gradients[member.index] == self._num_backwards_per_microbatch:
                raise second_gradient_error(member.name)
            self._num_gradients[member.index] += 1
            if self._has_samples:
                self._has_grad[member.index] = True
                self._copy_to_buffer(bucket, position, member, gradient)
            bucket.num_ready += 1
            while self._next_bucket < len(self._buckets) and self._is_full(self._buckets[self._next_bucket]):
                self._launch_next()

        return on_grad_ready

    def _is_full(self, bucket: _ScatterBucket) -> bool:
        return bucket.num_ready == len(bucket.member_sums) * self._num_backwards_per_microbatch

    def _copy_to_buffer(self, bucket: _ScatterBucket, position: int, member: NamedParameter, gradient: Tensor) -> None:
        if self._grid is not None:
            self._add_rounded(bucket, position, member, self._grid.gradients_by_use(member.name, gradient), self._grid)
        else:
            pairs = bucket.layout.matching_views(position, bucket.get_buffer(), gradient.contiguous())
            copy_all([target for target, _ in pairs], [rows for _, rows in pairs])

    def _add_rounded(
        self,
        bucket: _ScatterBucket,
        position: int,
        member: NamedParameter,
        gradients: Sequence[Tensor],
        grid: FixedPointGrid,
    ) -> None:
        index = self._row_shards[member.index].index
        exponent = grid.exponents[index]
        for use_index, gradient in enumerate(gradients):
            self._magnitudes.record(index, gradient)
            if exponent is None:
                continue
            for target, rows in bucket.layout.views_by_rank(position, bucket.get_buffer(), gradient):
                is_first = use_index == 0 and self._num_gradients[member.index] == 1
                add_rounded_gradient(rows, sums=target, exponent=exponent, is_first=is_first, scratch=self._scratch)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next_bucket]
        self._finish_pending(max_pending=MAX_IN_FLIGHT - 1)
        self._pending.append(bucket.launch(self._shard_world, is_first=self._num_backwards == 0))
        bucket.is_launched = True
        self._next_bucket += 1

    def _finish_pending(self, *, max_pending: int) -> None:
        while len(self._pending) > max_pending:
            self._pending.pop(0)()

    def _finish(self, divisor: float | Tensor | None) -> bool:
        """Set the gradients of the parameters that got a gradient on any rank."""
        has_grad_anywhere = torch.ones(len(self._row_shards), device=self._shard_world.device)  # 1.0 or 0.0
        missing_indices = [index for index, has_grad in enumerate(self._has_grad) if not has_grad]
        if missing_indices:
            has_grad_anywhere[missing_indices] = 0.0
        for world in self._worlds:
            world.all_reduce(has_grad_anywhere, op="max")
        for bucket in self._buckets:
            if divisor is not None:
                bucket.grad_sums.div_(divisor)
            for member, local_sum in zip(bucket.layout.members, bucket.member_sums, strict=True):
                if self._has_grad[member.index] or has_grad_anywhere[member.index]:
                    parameter = self._row_shards[member.index].parameter
                    parameter.grad = local_sum.view(parameter.shape).to(parameter.device)
        return True

    def _finish_exact(self, grid: FixedPointGrid, divisor: float | Tensor | None) -> bool:
        """Set the gradients from the integer sums if all of them fit the grid; return whether they do."""
        largest = grid.max_magnitudes(self._magnitudes, self._worlds)
        fits = grid.fits_all(largest)
        for bucket in self._buckets if fits else ():
            for member, local_sum in zip(bucket.layout.members, bucket.member_sums, strict=True):
                row_shard = self._row_shards[member.index]
                magnitude, has_grad = largest[row_shard.index]
                total = grid.sum_over_stages(row_shard.name, local_sum)
                if has_grad:
                    exponent = grid.exponents[row_shard.index] or 0
                    self._store_gradient(row_shard.parameter, total, magnitude, exponent, divisor)
        grid.update_exponents(largest)
        return fits

    def _store_gradient(
        self, parameter: nn.Parameter, sums: Tensor, magnitude: float, exponent: int, divisor: float | Tensor | None
    ) -> None:
        gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=sums.device)
        write_scaled_sums(sums, out=gradient, exponent=exponent, divisor=divisor, scratch=self._scratch)
        gradient = gradient if math.isfinite(magnitude) else gradient.fill_(math.nan)
        parameter.grad = gradient.to(parameter.device)
