"""ZeRO-1 and ZeRO-2: each rank's optimizer updates its rows, which are then all-gathered into the full parameters.

The model keeps full parameters. Stage 1 all-reduces full gradients, as data parallelism does; stage 2 reduce-scatters
them, so that each rank keeps only its rows (`reduce_scatter`; Rajbhandari et al., "ZeRO", 2020).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.module_access.parameters import NamedParameter, make_buckets, passing_bytes
from paceline.parallel.sharding.flat_buffer import FlatBufferLayout, start_all_gather
from paceline.parallel.sharding.row_shards import RowShard, RowSplit

IN_FLIGHT = 2


class RowsReducer:
    """The ZeRO-1 reducer: an inner reducer all-reduces full gradients, and each row shard gets a view of its rows."""

    needs_equal_microbatches = False

    def __init__(self, inner: Reducer, *, shares: Sequence[RowShard], cut: Mapping[str, RowSplit], place: int) -> None:
        self._inner = inner
        self._shares = list(shares)
        self._cuts = [cut[share.name] for share in shares]
        self._place = place

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        self._inner.begin()
        for share in self._shares:
            share.parameter.grad = None

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """Prepare the inner reducer. `counts` is ignored: a microbatch that does not count adds zeros."""
        del counts
        self._inner.before_backward(last=last)

    def after_backward(self) -> None:
        """Collect gradients in the inner reducer."""
        self._inner.after_backward()

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Set the `.grad` of each row shard to its rows of the global gradient."""
        if not self._inner.finish(divisor=divisor):
            return False
        for share, cut in zip(self._shares, self._cuts, strict=True):
            if share.holder.grad is not None:
                share.parameter.grad = cut.rows(share.holder.grad, self._place)
        return True

    def close(self) -> None:
        """Remove the gradient hooks."""
        self._inner.close()


class ParameterAllGather:
    """The all-gather after an update, which copies all ranks' updated rows into the full parameters."""

    def __init__(self, shares: Sequence[RowShard], *, cut: Mapping[str, RowSplit], world: World) -> None:
        self._shares = list(shares)
        self._world = world
        named = [NamedParameter(index=i, name=s.name, parameter=s.holder) for i, s in enumerate(shares)]
        units = make_buckets(named, bucket_bytes=passing_bytes(world)) if shares and world.world_size > 1 else []
        self._packings = [FlatBufferLayout(members, cut=cut, places=world.world_size) for members in reversed(units)]

    @torch.no_grad()
    def __call__(self) -> None:
        """Gather the updated rows, a few buckets at a time, so that memory never holds a second copy of the model."""
        rooms = [_Room(self._packings[turn::IN_FLIGHT]) for turn in range(IN_FLIGHT)]
        under_way: list[Callable[[], None]] = []
        for turn, packing in enumerate(self._packings):
            if len(under_way) == IN_FLIGHT:
                under_way.pop(0)()
            under_way.append(self._start(packing, rooms[turn % IN_FLIGHT]))
        for land in under_way:
            land()

    def _start(self, packing: FlatBufferLayout, room: "_Room") -> Callable[[], None]:
        shares = [self._shares[member.index] for member in packing.members]
        out, chunk = room.lay(packing)
        packing.put(chunk, [share.parameter.detach() for share in shares], place=self._world.rank)
        wait = start_all_gather(chunk, out=out, world=self._world)

        def land() -> None:
            wait()
            packing.spread(out, [share.holder.detach() for share in shares])

        return land


class _Room:
    """A buffer that successive all-gathers reuse.

    gloo's thread frees the tensors of a message some time after the wait: with new tensors for each bucket, three
    buckets would sometimes be in memory instead of two.
    """

    def __init__(self, packings: Sequence[FlatBufferLayout]) -> None:
        self._num_bytes = max((_bytes(packing) * (packing.places + 1) for packing in packings), default=0)
        self._memory: Tensor | None = None

    def lay(self, packing: FlatBufferLayout) -> tuple[Tensor, Tensor]:
        """Return a buffer for all ranks' chunks, and a zeroed one for this rank's chunk."""
        first = packing.members[0].parameter
        if self._memory is None:
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=first.device)
        each, places = _bytes(packing), packing.places
        out = self._memory[: each * places].view(first.dtype).view(places, packing.chunk)
        return out, self._memory[each * places : each * (places + 1)].view(first.dtype).zero_()


def _bytes(packing: FlatBufferLayout) -> int:
    return packing.chunk * packing.members[0].parameter.element_size()
