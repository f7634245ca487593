"""Keep the buffers of modules equal on all replicas, by one of several policies, although forwards change them."""

from typing import Literal

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import UsageError
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.module_access.tensor_access import copy_into, equal_tensors
from paceline.torch_internals.private_api import tensor_version

Policy = Literal["fold", "broadcast", "mean", "sync_bn"]
POLICIES = {
    "fold": "running statistics are folded over all microbatches in order, as one process does",
    "broadcast": "every rank gets rank 0's running statistics after each step",
    "mean": "running statistics are averaged over ranks after each step",
    "sync_bn": "batch statistics are taken over all ranks",
}


class BufferPolicy:
    """The policy that synchronizes changed buffers over the ranks.

    With the policy `fold`, `StatisticsRecorder` handles running statistics. Other changed buffers get rank 0's value,
    and the user gets a note.
    """

    def __init__(self, *, model: nn.Module, world: World, policy: Policy, exact: bool) -> None:
        self._world = world
        self._policy = policy
        self._exact = exact
        folded_prefixes = (
            {f"{name}." for name, _ in norms_with_statistics(model)} if policy in ("fold", "sync_bn") else set()
        )
        self._watched = [
            (name, tensor)
            for name, tensor in model.named_buffers()
            if not any(name.startswith(prefix) for prefix in folded_prefixes) and not tensor.is_meta
        ]
        self._can_restart = bool(folded_prefixes) and policy == "fold" and world.world_size > 1
        self._restorable_names: set[str] = set()  # of the buffers whose values are saved in every step
        self._previous_values: dict[str, Tensor] = {}  # the values of these buffers at the end of the last step
        self._versions: list[int] = []
        # all values at the last `accept_current_values`; None when values are no longer compared
        self._initial_values: list[Tensor] | None = None
        self._changed_without_version: list[str] = []
        self.notes: list[str] = []
        self._has_reported = False
        self.accept_current_values()

    @property
    def has_watched_buffers(self) -> bool:
        """Return whether the model has buffers to watch."""
        return bool(self._watched)

    def accept_current_values(self) -> None:
        """Save the current values, so that writes before this call are not attributed to a forward."""
        self._versions = self._current_versions()
        self._initial_values = [tensor.detach().clone() for _, tensor in self._watched]

    def has_changed(self) -> bool:
        """Return whether this rank's forward wrote to a watched buffer since the last step."""
        return bool(self.changed_names())

    def undo(self) -> None:
        """Restore the buffers that the step's forwards have changed, before the step is rerun.

        In the first step after `accept_current_values`, all buffers are restored. In a later step, a buffer that
        changes for the first time is not restored, because it has no saved value.
        """
        pairs = zip(self._watched, self._initial_values or (), strict=False)
        saved_values = {name: old for (name, _), old in pairs} or self._previous_values
        with torch.no_grad():
            for name, tensor in self._watched:
                if name in saved_values:
                    copy_into(tensor, saved_values[name])

    def stop_comparing_values(self) -> None:
        """Stop comparing values: by now all buffers that are written without a version change are known."""
        self._initial_values = None

    def synchronize(self, *, is_changed: bool) -> None:
        """Synchronize the buffers if a forward has changed them on any rank.

        Raises:
            UsageError: a buffer changed in exact mode, where its value would differ from that of one process.
        """
        if is_changed:
            changed_names = self.changed_names()
            self._report(changed_names)
            self._restorable_names.update(changed_names if self._can_restart else ())
            for _, tensor in self._watched:
                self._synchronize_buffer(tensor)
        self._versions, self._initial_values = self._current_versions(), None
        self._previous_values = {
            name: tensor.detach().clone() for name, tensor in self._watched if name in self._restorable_names
        }

    def new_notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""
        notes, self.notes = self.notes, []
        return notes

    def _report(self, names: list[str]) -> None:
        if self._exact and names:
            raise UsageError(
                f"the forward changes the buffer {names[0]}, which exact mode can't keep equal to one process.",
                hint="leave --train.exact out, or keep such state outside the forward",
            )
        if names and not self._has_reported and self._world.world_size > 1 and self._policy == "fold":
            self._has_reported = True
            self.notes.append(f"the forward changes {', '.join(names[:3])}; every rank gets rank 0's value")

    def _synchronize_buffer(self, tensor: Tensor) -> None:
        if self._world.world_size == 1:
            return
        with torch.no_grad():
            contiguous = tensor.clone(memory_format=torch.contiguous_format)
            if self._policy == "mean" and tensor.is_floating_point():
                self._world.all_reduce(contiguous).div_(self._world.world_size)
            else:
                self._world.broadcast(contiguous)
            copy_into(tensor, contiguous)

    def changed_names(self) -> list[str]:
        """Return the names of changed buffers.

        `F.batch_norm` writes without a version change. A buffer that changes this way in the first step after
        `accept_current_values` is assumed to change in every later step.
        """
        current_versions = self._current_versions()
        if self._initial_values is not None:
            pairs = zip(self._watched, self._initial_values, self._versions, current_versions, strict=True)
            self._changed_without_version = [
                name
                for (name, new), old, old_version, new_version in pairs
                if old_version == new_version and not equal_tensors(old, new)
            ]
        changed_versions = [
            name
            for (name, _), old, new in zip(self._watched, self._versions, current_versions, strict=True)
            if old != new
        ]
        return [*changed_versions, *self._changed_without_version]

    def _current_versions(self) -> list[int]:
        return [tensor_version(tensor) for _, tensor in self._watched]
