"""The choice of the folder for multiprocessing's sockets: the path of a socket has at most 107 characters."""

import os
import tempfile
from multiprocessing import current_process
from multiprocessing.util import get_temp_dir

_MAX_CHARACTERS = 107 - len("/pymp-01234567/listener-01234567")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def short_temporary_folder() -> str:
    """Return the folder of this process's sockets, made at the first call; forked processes share it.

    If the path of the temporary folder is too long for a socket, another writable folder is used.

    Raises:
        OSError: no folder can be made anywhere.
    """
    previous_folder = tempfile.tempdir
    default_folder = tempfile.gettempdir()
    try:
        if len(os.fsencode(default_folder)) > _MAX_CHARACTERS:
            tempfile.tempdir = next(
                (folder for folder in _SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), default_folder
            )
        return str(get_temp_dir())
    finally:
        tempfile.tempdir = previous_folder


def forget_temporary_folder() -> None:
    """Let the next call of `short_temporary_folder` make a folder, in a process that was forked after the first one."""
    current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
