"""Two-phase commit: a checkpoint is written to a staging folder, flushed and renamed; then `latest` names it.

Rank 0 creates the staging folder, every rank writes its files into it, and rank 0 writes the manifest and commits. A
kill at any moment leaves the older checkpoint intact, at the latest after the next start has restored its name.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import LATEST, STAGING_PREFIX, remove_leftovers, step_name
from paceline.checkpoint.files.manifest import Files
from paceline.filesystem.atomic_files import sync_folder, write_text
from paceline.filesystem.disk_full import convert_to_save_error, require_free_space


def total_bytes(files: Files) -> int:
    """Return the total size of the tensors in bytes."""
    return sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)


def create_staging_folder(folder: Path, *, step: int, num_bytes: int) -> Path:
    """Create the folder that the checkpoint of `step` is written into.

    Raises:
        SaveError: there is not enough space for `num_bytes`, or no permission.
    """
    staging = folder / f"{STAGING_PREFIX}{step_name(step)}-{os.getpid()}"
    with convert_to_save_error(f"step {step}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        require_free_space(folder, num_bytes)
        staging.mkdir()
    return staging


def discard_staging_folder(staging: Path) -> None:
    """Remove a folder that `create_staging_folder` created."""
    with suppress(OSError):
        shutil.rmtree(staging, ignore_errors=True)


def commit_checkpoint(folder: Path, staging: Path, *, step: int) -> Path:
    """Rename a staging folder to the checkpoint of its step, and make it the latest.

    If a kill interrupts the replacement of a checkpoint, `find_newest_usable` restores the replaced one.
    """
    final = folder / step_name(step)
    sync_folder(staging)
    if final.exists():
        old = folder / f"{STAGING_PREFIX}old-{final.name}-{os.getpid()}"
        final.rename(old)
        staging.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        staging.rename(final)
    sync_folder(folder)
    write_text(folder / LATEST, final.name + "\n")
    return final
