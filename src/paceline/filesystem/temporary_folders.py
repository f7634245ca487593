"""Temporary folders outside all runs. Creating one also removes the folders that killed processes have left."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".scratch"
_MAX_AGE_SECONDS = 86400.0


class ScratchFolder:
    """A temporary folder with a lock, which shows other processes that this process is alive and uses the folder."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    def keep(self) -> None:
        """Keep the folder for the user to read; after a day the next command removes it."""
        (self.path / _LOCK).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder, unless `keep` was called."""
        if (self.path / _LOCK).exists():
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


@contextmanager
def scratch_folder(name: str) -> Iterator[ScratchFolder]:
    """Create a temporary folder of this name and a random suffix, and remove it afterwards."""
    prefix = f"paceline-{name}-"
    remove_abandoned_folders(prefix)
    path = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    folder = ScratchFolder(path, os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(folder._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.path = path.rename(path.with_name(path.name.removeprefix(".")))  # it is locked now
        yield folder
    finally:
        folder.close()


def remove_abandoned_folders(prefix: str) -> None:
    """Remove this user's folders whose process was killed, and those that were kept for over a day.

    A folder whose name begins with a dot is still being created, and is not locked yet.
    """
    temp_root = Path(tempfile.gettempdir())
    for path in [*temp_root.glob(f"{prefix}*"), *temp_root.glob(f".{prefix}*")]:
        with suppress(OSError):
            stats = path.lstat()
            if path.is_symlink() or not path.is_dir() or stats.st_uid != os.geteuid():
                continue
            is_old = time.time() - stats.st_mtime > _MAX_AGE_SECONDS
            if is_old if path.name.startswith(".") else _is_free(path / _LOCK, if_missing=is_old):
                shutil.rmtree(path, ignore_errors=True)


def _is_free(lock: Path, *, if_missing: bool) -> bool:
    """Return True if no process holds the lock. Without a lock file, as in a kept folder, return `if_missing`."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return if_missing
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
