"""The synchronisation of the sites of local SGD and DiLoCo: when they synchronise, and the synchronised weights.

A synchronisation is a step of an outer optimizer. Its gradient is the change of the weights since the last
synchronisation, averaged over the sites (Douillard et al., "DiLoCo", 2023). With a learning rate of 1 and no
momentum, the result is the mean of the weights (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019).
If fragments are applied some updates after they are sent, the algorithm is Streaming DiLoCo (Douillard et al., 2025).
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
from paceline.step.local_sgd.outer_step import Fragment, SiteGroup, to_averaging_dtype

_RESHAPED = 2  # the change of a buffer: 0 none, 1 values, 2 shape


class SiteSynchronizer:
    """The synchronisation of the sites, on one rank: it sends and applies each fragment when the fragment is due.

    `tensors` are the parameters and buffers of the model; each rank knows their names and full shapes. `peers` are the
    ranks at the same position in all sites. `sync_after_update` is called after writes to weights, and updates the
    copies of these weights on other ranks. `on_write` is called after writes that may have changed buffers.
    """

    def __init__(
        self,
        *,
        rule: UpdateRule,
        named_parameters: Sequence[NamedParameter],
        tensors: ShardedTensors,
        peers: World,
        sync_after_update: Callable[[], None],
        on_write: Callable[[], None],
    ) -> None:
        self._rule = rule
        self._tensors = tensors
        self._sync_after_update = sync_after_update
        self._on_write = on_write
        self._sites = SiteGroup(peers)
        self._may_differ = False  # whether the weights may differ between sites
        shapes = {
            name: tensors.local_tensors[name].shard_spec.shape
            for name in tensors.names
            if name in tensors.parameter_names
        }
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        fragment_by_name = assign_fragments(sizes, fragments=rule.fragments)
        self.fragments = [
            Fragment([m for m in named_parameters if fragment_by_name[m.name] == number], rule=rule, sites=self._sites)
            for number in range(rule.fragments)
        ]
        self._initial_buffers = {name: tensor.clone() for name, tensor in self._buffers() if tensor.is_floating_point()}
        self._changing_buffers: list[str] = []  # the names of the buffers that have changed on any site

    @property
    def site_index(self) -> int:
        """The index of this site."""
        return self._sites.peers.rank

    @property
    def peers(self) -> World:
        """The ranks at this rank's position, one of each site."""
        return self._sites.peers

    @property
    def communication_cost(self) -> dict[str, float]:
        """The cost of synchronisation for this rank: bytes sent and seconds waited."""
        return {"sent_bytes": self.peers.traffic.sent_bytes, "waited_seconds": self._sites.waited_seconds}

    def synchronize_due(self, step: int) -> None:
        """Send and apply the fragments that are due after `step` updates."""
        self._may_differ = True
        fragment_number = fragment_to_send(step, update=self._rule)
        if fragment_number is not None:
            self.fragments[fragment_number].send(step)
        due = [fragment for fragment in self.fragments if fragment.due_step == step]
        for fragment in due:
            fragment.apply()
        if due:
            self._sync_after_update()
        if fragment_number == 0:
            self._average_buffers()
        self._may_differ = not self._is_synchronized(step)

    def wait_for_all(self) -> None:
        """Wait until no all-reduce is in flight."""
        for fragment in self.fragments:
            fragment.wait()

    def find_difference(self) -> str | None:
        """Return the first parameter whose synchronised weights differ between sites, or None if all are equal."""
        pairs = [
            (member.name, synchronized)
            for fragment in self.fragments
            for member, synchronized in zip(fragment.members, fragment.synchronized, strict=True)
        ]
        if not pairs:
            return None
        checksums = torch.stack([bits_checksum(synchronized.detach()) for _, synchronized in pairs])
        largest, smallest = (
            self.peers.all_reduce(checksums.clone(), op="max"),
            self.peers.all_reduce(checksums.clone(), op="min"),
        )
        different_indices = torch.nonzero(largest != smallest).reshape(-1).tolist()
        return pairs[different_indices[0]][0] if different_indices else None

    def reset(self) -> None:
        """Copy the current weights, which are equal on all sites, into the synchronised weights."""
        self._may_differ = False
        for fragment in self.fragments:
            fragment.reset()

    @contextmanager
    def mean_weights(self) -> Iterator[dict[str, Tensor]]:
        """Return a context in which the model has the mean of the sites' weights.

        It yields this site's own weights by name. The exit restores them bit for bit.
        """
        current = dict(self._local_state())
        local_weights = {name: tensor.clone() for name, tensor in current.items()}
        if self._may_differ:
            floats = {
                name: to_averaging_dtype(tensor) for name, tensor in local_weights.items() if tensor.is_floating_point()
            }
            self._write(current, dict(zip(floats, self._sites.mean(list(floats.values())), strict=True)))
        try:
            yield local_weights
        finally:
            if self._may_differ:
                self._write(current, local_weights)

    def restore(self, local_weights: Mapping[str, Tensor], *, step: int) -> None:
        """Restore this site's own weights and buffers, after `step` updates."""
        self._may_differ = not self._is_synchronized(step)
        self._changing_buffers = sorted(
            self._find_changing_buffers() | {name for name in local_weights if name in self._initial_buffers}
        )
        current = dict(self._local_state())
        self._write(current, {name: tensor for name, tensor in local_weights.items() if name in current})

    def _is_synchronized(self, step: int) -> bool:
        """Return whether all sites have equal weights after this step.

        If they have, no mean is computed, because its rounding could change the weights.
        """
        return fragment_to_send(step, update=self._rule) == 0 and self._rule.fragments == 1 and not self._rule.delay

    def _write(self, targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                copy_into(targets[name], value.to(targets[name].dtype))
        self._sync_after_update()
        self._on_write()

    def _local_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers on this rank whose values may differ between sites."""
        for fragment in self.fragments:
            yield from zip((member.name for member in fragment.members), fragment.weights, strict=True)
        self._changing_buffers = sorted(self._find_changing_buffers())
        for name, tensor in self._buffers():
            if name in self._changing_buffers or not tensor.is_floating_point():
                yield name, tensor

    def _average_buffers(self) -> None:
        """Replace each buffer that has changed by its mean over the sites."""
        self._changing_buffers = sorted(self._find_changing_buffers())
        buffers = dict(self._buffers())
        changing = [buffers[name] for name in self._changing_buffers]
        with torch.no_grad():
            for buffer, value in zip(
                changing, self._sites.mean([to_averaging_dtype(buffer) for buffer in changing]), strict=True
            ):
                copy_into(buffer, value.to(buffer.dtype))
        if changing:
            self._on_write()

    def _find_changing_buffers(self) -> set[str]:
        """Return the names of the buffers that have changed on any site. Constant buffers need not be sent.

        If a forward has replaced a buffer by a buffer of another shape, each site keeps its own: shapes may differ
        between sites, so no mean exists.
        """
        if not self._initial_buffers:
            return set()
        current = dict(self._buffers())
        changes = [
            _RESHAPED
            if current[name].shape != initial.shape
            else name in self._changing_buffers or not torch.equal(current[name], initial)
            for name, initial in self._initial_buffers.items()
        ]
        change_by_buffer = self._sites.peers.all_reduce(
            torch.tensor(changes, dtype=torch.uint8, device=self.peers.device), op="max"
        )
        return {
            name
            for name, change in zip(self._initial_buffers, change_by_buffer.tolist(), strict=True)
            if change and change != _RESHAPED
        }

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, entry in self._tensors.local_tensors.items():
            tensor = entry.tensor if entry.is_buffer else None
            if tensor is not None:
                yield name, tensor
