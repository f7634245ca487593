"""The outer optimizer of local SGD and DiLoCo: when sites synchronise which parameters, and the synchronised weights.

A synchronisation is a step of an outer optimizer. Its gradient is the mean over the sites of the change of the weights
since the last synchronisation (Douillard et al., "DiLoCo", 2023). With a learning rate of 1 and no momentum the result
is the mean of the weights (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019). If fragments are
applied some updates after they are sent, it is Streaming DiLoCo (Douillard et al., 2025).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.config.update_rule import UpdateRule
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.parallel.module_access.tensor_access import bits_checksum, copy_into
from paceline.planner.layout.local_sgd_checks import assign_fragments, fragment_to_send
from paceline.step.local_sgd.outer_step import Fragment, SiteGroup, averaging_dtype_tensor

_RESHAPED = 2


class FragmentSchedule:
    """The outer optimizer on one rank: it sends and applies each fragment when it is due.

    `weights` has the name and full shape of every parameter, on every rank. `peers` are the ranks at the same position
    in all sites. `on_write` is called after buffers or weights were overwritten.
    """

    def __init__(
        self,
        *,
        rule: UpdateRule,
        named: Sequence[NamedParameter],
        weights: ShardedTensors,
        peers: World,
        spread: Callable[[], None],
        wrote: Callable[[], None],
    ) -> None:
        self._rule = rule
        self._weights = weights
        self._spread = spread
        self._wrote = wrote
        self._link = SiteGroup(peers)
        self._apart = False
        shapes = {name: weights.mine[name].part.shape for name in weights.names if name in weights.parameters}
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        place = assign_fragments(sizes, fragments=rule.fragments)
        self.fragments = [
            Fragment([m for m in named if place[m.name] == number], rule=rule, link=self._link)
            for number in range(rule.fragments)
        ]
        self._first = {name: tensor.clone() for name, tensor in self._buffers() if tensor.is_floating_point()}
        self._moving: list[str] = []

    @property
    def number(self) -> int:
        """The index of this site."""
        return self._link.peers.rank

    @property
    def peers(self) -> World:
        """The ranks at this rank's position, one of each site."""
        return self._link.peers

    @property
    def told(self) -> dict[str, float]:
        """The cost of synchronisation for this rank: bytes sent and seconds waited."""
        return {"sent_bytes": self.peers.traffic.sent_bytes, "waited_seconds": self._link.waited_seconds}

    def after(self, step: int) -> None:
        """Send and apply the fragments that are due after `step` updates."""
        self._apart = True
        number = fragment_to_send(step, update=self._rule)
        if number is not None:
            self.fragments[number].send(step)
        due = [fragment for fragment in self.fragments if fragment.due == step]
        for fragment in due:
            fragment.take()
        if due:
            self._spread()
        if number == 0:
            self._meet_buffers()
        self._apart = not self._has_met(step)

    def arrive(self) -> None:
        """Wait until no all-reduce is in flight."""
        for fragment in self.fragments:
            fragment.arrive()

    def differing(self) -> str | None:
        """Return the first parameter whose synchronised weights differ between sites, or None if all are equal."""
        pairs = [
            (member.name, agreed)
            for fragment in self.fragments
            for member, agreed in zip(fragment.members, fragment.agreed, strict=True)
        ]
        if not pairs:
            return None
        mine = torch.stack([bits_checksum(agreed.detach()) for _, agreed in pairs])
        most, least = self.peers.all_reduce(mine.clone(), op="max"), self.peers.all_reduce(mine.clone(), op="min")
        apart = torch.nonzero(most != least).reshape(-1).tolist()
        return pairs[apart[0]][0] if apart else None

    def begin(self) -> None:
        """Take the current weights, which are equal on all sites, as the synchronised weights."""
        self._apart = False
        for fragment in self.fragments:
            fragment.begin()

    @contextmanager
    def together(self) -> Iterator[dict[str, Tensor]]:
        """Return a context in which the model has the mean of the sites' weights.

        It yields this site's own weights, and restores them bit for bit at its end.
        """
        live = dict(self._live())
        own = {name: tensor.clone() for name, tensor in live.items()}
        if self._apart:
            floats = {
                name: averaging_dtype_tensor(tensor) for name, tensor in own.items() if tensor.is_floating_point()
            }
            self._put(live, dict(zip(floats, self._link.mean(list(floats.values())), strict=True)))
        try:
            yield own
        finally:
            if self._apart:
                self._put(live, own)

    def restore(self, own: Mapping[str, Tensor], *, step: int) -> None:
        """Restore this site's own weights and buffers, after `step` updates."""
        self._apart = not self._has_met(step)
        self._moving = sorted(self._moving_everywhere() | {name for name in own if name in self._first})
        live = dict(self._live())
        self._put(live, {name: tensor for name, tensor in own.items() if name in live})

    def _has_met(self, step: int) -> bool:
        """Return whether all sites have equal weights; a mean is then skipped, because rounding could change them."""
        return fragment_to_send(step, update=self._rule) == 0 and self._rule.fragments == 1 and not self._rule.delay

    def _put(self, live: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                copy_into(live[name], value.to(live[name].dtype))
        self._spread()
        self._wrote()

    def _live(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers on this rank whose values differ between sites."""
        for fragment in self.fragments:
            yield from zip((member.name for member in fragment.members), fragment.live, strict=True)
        self._moving = sorted(self._moving_everywhere())
        for name, tensor in self._buffers():
            if name in self._moving or not tensor.is_floating_point():
                yield name, tensor

    def _meet_buffers(self) -> None:
        self._moving = sorted(self._moving_everywhere())
        buffers = dict(self._buffers())
        mine = [buffers[name] for name in self._moving]
        with torch.no_grad():
            for buffer, value in zip(
                mine, self._link.mean([averaging_dtype_tensor(buffer) for buffer in mine]), strict=True
            ):
                copy_into(buffer, value.to(buffer.dtype))
        if mine:
            self._wrote()

    def _moving_everywhere(self) -> set[str]:
        """Return the names of the buffers that have changed on any site; constant buffers need not be sent.

        A buffer that a forward has replaced by one of another shape stays local to each site: shapes may differ
        between sites, so there is no mean.
        """
        if not self._first:
            return set()
        now = dict(self._buffers())
        moved = [
            _RESHAPED if now[name].shape != first.shape else name in self._moving or not torch.equal(now[name], first)
            for name, first in self._first.items()
        ]
        told = self._link.peers.all_reduce(torch.tensor(moved, dtype=torch.uint8, device=self.peers.device), op="max")
        return {name for name, how in zip(self._first, told.tolist(), strict=True) if how and how != _RESHAPED}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, held in self._weights.mine.items():
            tensor = held.tensor if held.is_buffer else None
            if tensor is not None:
                yield name, tensor
