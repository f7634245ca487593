"""Folders of checkpoints in memory: a command chooses its own, and removes those that killed commands left."""

import fcntl
import json
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from paceline.filesystem.atomic_files import parse_json, read_regular, write_text
from paceline.filesystem.run_lock import LOCK

MEMORY_DISK = Path("/dev/shm")
LOCKED_RUN = "run"
"""The file in such a folder that names the lock file of the run, which its command has locked."""
_PREFIX = "paceline-memory-"
_MAX_BYTES = 1 << 14


def choose_memory_folder() -> str:
    """Return the folder for this command's checkpoints in memory, or an empty text if there is no such disk.

    The first save creates it. Until then, a command that is killed leaves nothing behind.
    """
    if not os.access(MEMORY_DISK, os.W_OK | os.X_OK):
        return ""
    return str(MEMORY_DISK / f"{_PREFIX}{secrets.token_hex(8)}")


def describe_lock(run: Path) -> str:
    """Return the content of `LOCKED_RUN` for a run: the path of its lock file, and the file's identity."""
    path = run.resolve() / LOCK
    stats = path.stat()
    return json.dumps([str(path), stats.st_dev, stats.st_ino])


def lock_memory_folder(folder: Path) -> int:
    """Mark a folder as in use until this process ends or closes the returned descriptor.

    For a node of a run on several nodes: the lock of the run folder is held by another machine.

    Raises:
        OSError: the folder can't be written.
    """
    path = folder / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    stats = os.fstat(handle)
    write_text(folder / LOCKED_RUN, json.dumps([str(path), stats.st_dev, stats.st_ino]))
    return handle


def remove_abandoned_memory_folders(locked_run: Path | None = None) -> None:
    """Remove the folders of this user's commands that were killed together with all of their processes.

    A folder is removed only if its command's own lock file was found and is not locked: another container may have
    another run at the same path. If the caller has locked `locked_run`, folders of this run are abandoned too.
    """
    own_lock = None
    with suppress(OSError):
        own_lock = None if locked_run is None else json.loads(describe_lock(locked_run))
    for folder in MEMORY_DISK.glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError, TypeError, LookupError):
            stats = folder.lstat()
            if not stat.S_ISDIR(stats.st_mode) or stats.st_uid != os.geteuid():
                continue
            record = parse_json(read_regular(folder / LOCKED_RUN, max_bytes=_MAX_BYTES))
            if record == own_lock or _is_free(Path(record[0]), record[1:]):
                shutil.rmtree(folder)


def _is_free(lock: Path, identity: list[int]) -> bool:
    """Return whether a lock file has this identity and is not locked.

    Raises:
        OSError: it is locked, or can't be opened.
    """
    handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stats = os.fstat(handle)
        return [stats.st_dev, stats.st_ino] == identity
    finally:
        os.close(handle)
