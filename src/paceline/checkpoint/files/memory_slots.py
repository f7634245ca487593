"""Slots: files in memory that a rank writes again and again, so that their memory is allocated only once.

A checkpoint in memory consists of hard links to slots. A slot is free again when no checkpoint links to it.
"""

import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.manifest import Files, file_entry
from paceline.checkpoint.files.safetensors_io import TensorEntry, Writable, plan_layout, sha256_digest
from paceline.filesystem.disk_full import require_free_space


@dataclass(frozen=True, kw_only=True)
class _Slot:
    path: Path
    buffer: mmap.mmap

    @property
    def is_free(self) -> bool:
        return self.path.stat().st_nlink == 1


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file of a checkpoint in memory: complete, but the entries of its tensors have no digests yet."""

    path: Path
    entries: Sequence[TensorEntry]
    buffer: mmap.mmap

    def with_digests(self) -> dict[str, Any]:
        """Return the manifest's entry for this file, after computing the digests of all tensors."""
        with memoryview(self.buffer) as data:
            entries = [replace(entry, digest=_digest(data, entry)) for entry in self.entries]
        return file_entry(self.path, entries)


class MemorySlots:
    """The slots of one rank, in a folder of its own. There are as many as there are checkpoints that link to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._slots: dict[str, list[_Slot]] = {}
        self._layouts: dict[str, tuple[list[Any], tuple[list[TensorEntry], bytes]]] = {}
        self._num_created = 0

    def write(self, staging: Path, files: Files) -> dict[str, WrittenFile]:
        """Write this rank's files of a checkpoint, and link them into its staging folder.

        Raises:
            SaveError: there is not enough memory.
            OSError: a file can't be written.
        """
        return {name: self._write_file(staging / name, tensors) for name, tensors in files.items()}

    def remove(self) -> None:
        """Remove all slots. Checkpoints that link to them keep their content."""
        self._slots.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write_file(self, path: Path, tensors: Sequence[Writable]) -> WrittenFile:
        entries, header = self._plan_layout(path.name, tensors)
        slot = self._take(path.name, num_bytes=entries[-1].stop if entries else len(header))
        with memoryview(slot.buffer) as target:
            target[: len(header)] = header
            for entry, tensor in zip(entries, tensors, strict=True):
                tensor.copy_into(target[entry.start : entry.stop])
        path.unlink(missing_ok=True)
        path.hardlink_to(slot.path)
        return WrittenFile(path=path, entries=entries, buffer=slot.buffer)

    def _plan_layout(self, name: str, tensors: Sequence[Writable]) -> tuple[list[TensorEntry], bytes]:
        """Return the layout of a file. It is planned again only if a tensor has changed, apart from its values."""
        fields = [(tensor.name, tensor.dtype, tensor.shape, tensor.at, tensor.whole) for tensor in tensors]
        planned_fields, layout = self._layouts.get(name, (None, None))
        if layout is None or fields != planned_fields:
            layout = plan_layout(tensors)
            self._layouts[name] = fields, layout
        return layout

    def _take(self, name: str, *, num_bytes: int) -> _Slot:
        """Return a free slot of this size for the file `name`, and remove free slots of other sizes."""
        slots = self._slots.setdefault(name, [])
        free = [slot for slot in slots if slot.is_free]
        for slot in free:
            if len(slot.buffer) != num_bytes:
                slots.remove(slot)
                slot.path.unlink()
        usable = [slot for slot in free if len(slot.buffer) == num_bytes]
        if usable:
            return usable[0]
        require_free_space(self._folder, num_bytes)
        slots.append(self._create(num_bytes))
        return slots[-1]

    def _create(self, num_bytes: int) -> _Slot:
        """Create a slot. Its memory is allocated here, because a later write to missing memory would kill the process.

        Raises:
            OSError: there is not enough memory.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._num_created += 1
        path = self._folder / str(self._num_created)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
            return _Slot(path=path, buffer=mmap.mmap(handle, num_bytes))
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(handle)


def _digest(data: memoryview, entry: TensorEntry) -> str:
    with data[entry.start : entry.stop] as tensor:
        return sha256_digest(tensor)


def compute_digests(written: Mapping[str, WrittenFile]) -> dict[str, Any]:
    """Return the manifest's entries for files that `MemorySlots.write` wrote."""
    return {name: file.with_digests() for name, file in written.items()}
