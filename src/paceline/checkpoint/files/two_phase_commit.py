"""Two-phase commit: a checkpoint is written aside, flushed and renamed; then it is the latest.

One rank begins, every rank writes its files into the folder that nobody reads yet, and one writes the manifest and
commits: a kill at any moment leaves the older checkpoint.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import ASIDE, LATEST, remove_leftovers, step_name
from paceline.checkpoint.files.manifest import Files
from paceline.console.formatting import format_size
from paceline.errors import SaveError
from paceline.filesystem.atomic_files import free_bytes, sync_folder, write_text
from paceline.filesystem.disk_full import as_checkpoint_error

_SPARE_BYTES = 16 << 20


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


def commit(folder: Path, aside: Path, *, step: int) -> Path:
    """Rename a written folder to the checkpoint of its step, and make it the latest.

    If a kill leaves a replaced checkpoint aside, whoever opens the folder next puts it back (`checkpoint_folder`).
    """
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
