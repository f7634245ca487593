"""ZeRO-1 and ZeRO-2: each rank's optimizer has its own rows; the updated rows are gathered into the whole parameters.

The model stays the user's own and whole. Stage 1 adds whole gradients as data parallelism does, stage 2 keeps each
rank's own rows of them (Rajbhandari et al., "ZeRO", 2020).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.place.replicate import Reducer
from paceline.place.shard.packing import Packing, start_all_gather
from paceline.place.shard.share import Cut, Share
from paceline.place.units import Named, cut_units, passing_bytes
from paceline.world import World

IN_FLIGHT = 2


class RowsReducer:
    """ZeRO-1: another reducer's whole gradients, of which each share gets its rows, without a copy."""

    meets = False

    def __init__(self, inner: Reducer, *, shares: Sequence[Share], cut: Mapping[str, Cut], place: int) -> None:
        self._inner = inner
        self._shares = list(shares)
        self._cuts = [cut[share.name] for share in shares]
        self._place = place

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self._inner.begin()
        for share in self._shares:
            share.parameter.grad = None

    def before_backward(self, *, last: bool, counts: bool = True) -> None:
        """As for whole gradients, where no replica has to stand in; one that does adds zeros."""
        del counts
        self._inner.before_backward(last=last)

    def after_backward(self) -> None:
        """As for whole gradients."""
        self._inner.after_backward()

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Give each share its rows of the global gradient."""
        if not self._inner.finish(divisor=divisor):
            return False
        for share, cut in zip(self._shares, self._cuts, strict=True):
            if share.holder.grad is not None:
                share.parameter.grad = cut.rows(share.holder.grad, self._place)
        return True

    def close(self) -> None:
        """Remove the hooks."""
        self._inner.close()


class Spread:
    """After an update: every place's new rows, gathered into the parameters that each rank holds whole."""

    def __init__(self, shares: Sequence[Share], *, cut: Mapping[str, Cut], world: World) -> None:
        self._shares = list(shares)
        self._world = world
        named = [Named(index=i, name=s.name, parameter=s.holder) for i, s in enumerate(shares)]
        units = cut_units(named, bucket_bytes=passing_bytes(world.device)) if shares and world.world_size > 1 else []
        self._packings = [Packing(members, cut=cut, places=world.world_size) for members in reversed(units)]

    @torch.no_grad()
    def __call__(self) -> None:
        """Gather; a few units are under way at a time, so that no second copy of the model is held."""
        under_way: list[Callable[[], None]] = []
        for packing in self._packings:
            if len(under_way) == IN_FLIGHT:
                under_way.pop(0)()
            under_way.append(self._start(packing))
        for land in under_way:
            land()

    def _start(self, packing: Packing) -> Callable[[], None]:
        place = self._world.rank
        shares = [self._shares[member.index] for member in packing.members]
        first = shares[0].holder
        chunk = torch.zeros(packing.chunk, dtype=first.dtype, device=first.device)
        packing.put(chunk, [share.parameter.detach() for share in shares], place=place)
        out = torch.empty(packing.places, packing.chunk, dtype=first.dtype, device=first.device)
        wait = start_all_gather(chunk, out=out, world=self._world)

        def land() -> None:
            wait()
            packing.spread(out, [share.holder.detach() for share in shares])

        return land
