"""Two-phase commit: a checkpoint is written aside, flushed and renamed; then it is the latest.

One process does it with `save`. If the ranks hold shards, one begins, every rank writes its files into the folder that
nobody reads yet, and one writes the manifest and commits: a kill at any moment leaves the older checkpoint.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import ASIDE, LATEST, remove_leftovers, step_name
from paceline.checkpoint.files.manifest import Files, write_files, write_manifest
from paceline.console.formatting import format_size
from paceline.errors import SaveError
from paceline.filesystem.atomic_files import free_bytes, sync_folder, write_text
from paceline.filesystem.disk_full import as_checkpoint_error

_SPARE_BYTES = 16 << 20


def save(folder: Path, *, step: int, files: Files, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` into `folder` and make it the latest.

    Raises:
        SaveError: no space or no permission; older checkpoints are unchanged.
    """
    aside = begin(folder, step=step, num_bytes=bytes_of(files))
    with as_checkpoint_error(f"step {step}", folder):
        try:
            write_part(aside, files=files, state=state, step=step)
            return commit(folder, aside, step=step)
        except BaseException:
            discard(aside)
            raise


def bytes_of(files: Files) -> int:
    """Return the total size of the tensors in bytes."""
    return sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)


def begin(folder: Path, *, step: int, num_bytes: int) -> Path:
    """Create the folder that the checkpoint of `step` is written into.

    Raises:
        SaveError: less than `num_bytes` are free, or no permission.
    """
    aside = folder / f"{ASIDE}{step_name(step)}-{os.getpid()}"
    with as_checkpoint_error(f"step {step}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _check_space(folder, num_bytes)
        aside.mkdir()
    return aside


def discard(aside: Path) -> None:
    """Remove a folder made by `begin`."""
    with suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)


def write_part(aside: Path, *, files: Files, state: Mapping[str, Any], step: int) -> None:
    """Write tensors and manifest into a folder that nobody reads yet, and flush them."""
    write_manifest(aside, listed=write_files(aside, files), state=state, step=step)


def commit(folder: Path, aside: Path, *, step: int) -> Path:
    """Rename a written folder to the checkpoint of its step, and make it the latest."""
    final = folder / step_name(step)
    sync_folder(aside)
    if final.exists():
        old = folder / f"{ASIDE}old-{final.name}-{os.getpid()}"
        final.rename(old)
        aside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(final)
    sync_folder(folder)
    write_text(folder / LATEST, final.name + "\n")
    return final


def _check_space(folder: Path, num_bytes: int) -> None:
    needed = num_bytes + _SPARE_BYTES
    free = free_bytes(folder)
    if free < needed:
        raise SaveError(
            f"a checkpoint needs {format_size(num_bytes)} and {format_size(_SPARE_BYTES)} to spare, "
            f"{format_size(free)} are free.",
            where=str(folder),
            hint="free some space, or --run-dir on another disk; older checkpoints are unchanged",
        )
