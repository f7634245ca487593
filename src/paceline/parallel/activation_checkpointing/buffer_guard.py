"""Protect a block's buffers while its forward is recomputed.

A recomputed forward must not read or change the buffers that the first run has written. Otherwise BatchNorm would count
its batch twice, and a spectral norm would start from other vectors. So while a block is recomputed, copies from the
start of the first run replace all buffers that the block's forward writes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.parallel.module_access.tensor_access import equal_tensors
from paceline.torch_internals.dispatch_modes import hide_from_modes
from paceline.torch_internals.private_api import NormBase, tensor_version

_MARK = "paceline_stand_in"
_Key = tuple[nn.Module, str]  # a module and the name of its buffer


def is_stand_in(buffer: Tensor | None) -> bool:
    """Return True if the buffer is a temporary copy, so that writes to it are discarded."""
    return getattr(buffer, _MARK, False)


class BufferSnapshot:
    """A snapshot of the buffers of a block at the start of one call."""

    def __init__(self, block: "BlockBuffers") -> None:
        self._block = block
        self._buffers = {key: (buffer, tensor_version(buffer)) for key, buffer in block.current_buffers()}
        # the first call copies all buffers; later calls copy norm statistics and the buffers that earlier calls wrote
        copied = (
            self._buffers
            if block.written_buffers is None
            else (block.written_buffers | block.norm_buffers) & self._buffers.keys()
        )
        self._copies = {key: self._buffers[key][0].detach().clone() for key in copied}

    def finish_first_run(self) -> list[str]:
        """Record the buffers that the first run has written or replaced, and free the copies of all other buffers.

        Return the names of written or replaced buffers that are not norm statistics.

        Raises:
            JobError: the run has written a buffer that no earlier call wrote, so its old value was not saved.
        """
        current = dict(self._block.current_buffers())
        replaced = {key for key, (buffer, _) in self._buffers.items() if current.get(key) is not buffer}
        written = {
            key
            for key, (buffer, version_before) in self._buffers.items()
            if tensor_version(buffer) != version_before or self._has_changed(key, buffer)
        }
        for key in sorted((written | replaced) - self._copies.keys(), key=lambda key: key[1]):
            if key in written:
                raise self._block.late_write_error(key)
            self._copies[key] = self._buffers[key][0]
        self._copies = {key: copy for key, copy in self._copies.items() if key in written | replaced}
        self._block.written_buffers = (self._block.written_buffers or set()) | written
        self._buffers.clear()
        return sorted(name for _, name in (written | replaced) - self._block.norm_buffers)

    def restore(self) -> None:
        """Restore all buffers after the run has failed."""
        for (module, name), (buffer, _) in self._buffers.items():
            module._buffers[name] = buffer
        with torch.no_grad():
            for key, copy in self._copies.items():
                self._buffers[key][0].copy_(copy)

    def _has_changed(self, key: _Key, buffer: Tensor) -> bool:
        """Return True if a buffer may have changed without a version change, as BatchNorm's buffers do.

        Other buffers are compared only in the first call, because the comparison synchronizes a GPU.
        """
        is_first_call = self._block.written_buffers is None
        return key in self._copies and (
            key in self._block.norm_buffers or (is_first_call and not equal_tensors(self._copies[key], buffer))
        )

    @contextmanager
    def use_saved_buffers(self) -> Iterator[None]:
        """Replace the block's buffers by copies of their old values inside this context."""
        current = {(module, name): module._buffers[name] for module, name in self._copies}
        try:
            for (module, name), copy in self._copies.items():
                with hide_from_modes():
                    stand_in = copy.clone()
                setattr(stand_in, _MARK, True)
                module._buffers[name] = stand_in
            yield
        finally:
            for (module, name), buffer in current.items():
                module._buffers[name] = buffer


class BlockBuffers:
    """A record of the buffers that a block's forward writes. `written_buffers` is None before the first call."""

    def __init__(self, *, name: str, block: nn.Module) -> None:
        self._name, self._block = name, block
        self.written_buffers: set[_Key] | None = None
        self.norm_buffers = {(m, name) for m in block.modules() if isinstance(m, NormBase) for name in m._buffers}

    def current_buffers(self) -> list[tuple[_Key, Tensor]]:
        """Return the current buffers."""
        return [
            ((module, name), buffer)
            for module in self._block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def late_write_error(self, key: _Key) -> JobError:
        """Return the error for a buffer that is written for the first time in a later call."""
        owner = next(name for name, module in self._block.named_modules() if module is key[0])
        path = ".".join(part for part in (self._name, owner, key[1]) if part)
        return JobError(
            f"the forward wrote to the buffer {path}, which it had not changed before, so it can't be recomputed "
            "exactly.",
            cause="remat recomputes a block's forward in backward",
            hint="write to it in every training forward or in none, or remat=none",
        )
