"""ZeRO-1 and ZeRO-2: each rank's optimizer updates its rows, which are then all-gathered into the full parameters.

The model keeps full parameters. Stage 1 all-reduces full gradients, as data parallelism does; stage 2 reduce-scatters
them, so that each rank keeps only its rows (`reduce_scatter_gradients`; Rajbhandari et al., "ZeRO", 2020).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets, transient_bucket_bytes
from paceline.parallel.sharding.flat_buffer import FlatBufferLayout, start_all_gather
from paceline.parallel.sharding.row_shards import RowShard, RowSplit

MAX_IN_FLIGHT = 2


class RowShardReducer:
    """The ZeRO-1 reducer: an inner reducer all-reduces full gradients, and each row shard gets a view of its rows."""

    needs_equal_microbatches = False

    def __init__(
        self, inner: Reducer, *, row_shards: Sequence[RowShard], row_splits: Mapping[str, RowSplit], shard_rank: int
    ) -> None:
        self._inner = inner
        self._row_shards = list(row_shards)
        self._row_splits = [row_splits[row_shard.name] for row_shard in row_shards]
        self._shard_rank = shard_rank

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        self._inner.begin()
        for row_shard in self._row_shards:
            row_shard.parameter.grad = None

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Prepare the inner reducer. `has_samples` is ignored: a microbatch without samples adds zeros."""
        del has_samples
        self._inner.before_backward(last=last)

    def after_backward(self) -> None:
        """Collect gradients in the inner reducer."""
        self._inner.after_backward()

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Set the `.grad` of each row shard to its rows of the global gradient."""
        if not self._inner.finish(divisor=divisor):
            return False
        for row_shard, row_split in zip(self._row_shards, self._row_splits, strict=True):
            if row_shard.model_parameter.grad is not None:
                row_shard.parameter.grad = row_split.shard_view(row_shard.model_parameter.grad, self._shard_rank)
        return True

    def close(self) -> None:
        """Remove the gradient hooks."""
        self._inner.close()


class ParameterAllGather:
    """The all-gather after an update, which copies all ranks' updated rows into the full parameters."""

    def __init__(self, row_shards: Sequence[RowShard], *, row_splits: Mapping[str, RowSplit], world: World) -> None:
        self._row_shards = list(row_shards)
        self._world = world
        named_parameters = [
            NamedParameter(index=i, name=s.name, parameter=s.model_parameter) for i, s in enumerate(row_shards)
        ]
        buckets = (
            make_buckets(named_parameters, bucket_bytes=transient_bucket_bytes(world))
            if row_shards and world.world_size > 1
            else []
        )
        self._layouts = [
            FlatBufferLayout(members, row_splits=row_splits, num_shards=world.world_size)
            for members in reversed(buckets)
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Gather the updated rows, a few buckets at a time, so that buffers for the whole model are never in memory."""
        staging_buffers = [_StagingBuffer(self._layouts[index::MAX_IN_FLIGHT]) for index in range(MAX_IN_FLIGHT)]
        pending: list[Callable[[], None]] = []
        for index, layout in enumerate(self._layouts):
            if len(pending) == MAX_IN_FLIGHT:
                pending.pop(0)()
            pending.append(self._start(layout, staging_buffers[index % MAX_IN_FLIGHT]))
        for finish in pending:
            finish()

    def _start(self, layout: FlatBufferLayout, staging_buffer: "_StagingBuffer") -> Callable[[], None]:
        row_shards = [self._row_shards[member.index] for member in layout.members]
        out, chunk = staging_buffer.make_views(layout)
        layout.pack_chunk(
            chunk, [row_shard.parameter.detach() for row_shard in row_shards], shard_rank=self._world.rank
        )
        wait = start_all_gather(chunk, out=out, world=self._world)

        def finish() -> None:
            wait()
            layout.unpack_into(out, [row_shard.model_parameter.detach() for row_shard in row_shards])

        return finish


class _StagingBuffer:
    """A buffer that successive all-gathers reuse.

    The gloo backend frees the tensors of a collective some time after the wait. With new tensors for each bucket, more
    than `MAX_IN_FLIGHT` buckets would sometimes be in memory.
    """

    def __init__(self, layouts: Sequence[FlatBufferLayout]) -> None:
        self._num_bytes = max((_chunk_bytes(layout) * (layout.num_shards + 1) for layout in layouts), default=0)
        self._memory: Tensor | None = None

    def make_views(self, layout: FlatBufferLayout) -> tuple[Tensor, Tensor]:
        """Return a buffer for all ranks' chunks, and a zeroed one for this rank's chunk."""
        first = layout.members[0].parameter
        if self._memory is None:
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=first.device)
        chunk_bytes, num_shards = _chunk_bytes(layout), layout.num_shards
        out = self._memory[: chunk_bytes * num_shards].view(first.dtype).view(num_shards, layout.chunk_numel)
        return out, self._memory[chunk_bytes * num_shards : chunk_bytes * (num_shards + 1)].view(first.dtype).zero_()


def _chunk_bytes(layout: FlatBufferLayout) -> int:
    return layout.chunk_numel * layout.members[0].parameter.element_size()
