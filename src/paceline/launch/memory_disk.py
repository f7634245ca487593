"""Folders of checkpoints in memory: a command chooses its own, and removes those that killed commands left."""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.filesystem.run_lock import is_run_folder_locked

MEMORY_DISK = Path("/dev/shm")
LOCKED_RUN = "run"
"""The file in such a folder that contains the path of the run, whose lock its command holds."""
_PREFIX = "paceline-memory-"


def choose_memory_folder() -> str:
    """Return the folder for this command's checkpoints in memory, or an empty text if there is no such disk.

    The first save creates it. Until then, a command that is killed leaves nothing behind.
    """
    if not os.access(MEMORY_DISK, os.W_OK | os.X_OK):
        return ""
    return str(MEMORY_DISK / f"{_PREFIX}{secrets.token_hex(8)}")


def remove_abandoned_memory_folders() -> None:
    """Remove the folders of this user's commands that were killed together with all of their processes.

    Call this before the run is locked, because the same run may have left a folder. If the run of a folder is not
    found, its command may be running in another container, so the folder is kept.
    """
    for folder in MEMORY_DISK.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            run = Path((folder / LOCKED_RUN).read_text())
            if folder.stat().st_uid == os.geteuid() and run.is_dir() and not is_run_folder_locked(run):
                shutil.rmtree(folder)
