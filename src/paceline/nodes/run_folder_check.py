"""The check that the run folder can be written, and that all nodes see the same one."""

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

_LOOK_SECONDS, _POLL_SECONDS = 3.0, 0.05


class RunFolderProbe:
    """A file that the head writes into the run folder, for the other nodes to look for.

    The folder is created, as a training would do, and removed again with the file.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f".paceline-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.problem = ""
        """Why the folder can't be written; empty if it can."""
        self._folder = folder
        self._created = [path for path in (folder, *folder.parents) if not _is_there(path)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.name).write_text("x")
        except OSError as error:
            self.problem = error.strerror or str(error)

    def remove(self) -> None:
        """Remove the file, and the folders that were created for it."""
        with suppress(OSError):
            (self._folder / self.name).unlink(missing_ok=True)
            for path in self._created:
                path.rmdir()


def look_for_probe(folder: Path, name: str) -> tuple[bool, str]:
    """Return whether a node sees the head's file, and why it can't write there itself; empty if it can.

    On a network disk, the file may take a moment.
    """
    path, deadline = folder / Path(name).name, time.monotonic() + _LOOK_SECONDS
    while not _is_there(path) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if not _is_there(path):
        return False, ""
    own = folder / f"{path.name}-{secrets.token_hex(8)}"
    try:
        own.write_text("x")
        own.unlink()
    except OSError as error:
        return True, error.strerror or str(error)
    return True, ""


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder above it can't be read
        return False
