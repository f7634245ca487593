"""The folder of multiprocessing's sockets: a socket address is a path of at most 107 characters."""

import os
import tempfile
from multiprocessing.util import get_temp_dir

_MOST_CHARACTERS = 107 - len("/pymp-01234567/listener-01234567")
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def short_temporary_folder() -> str:
    """Return the folder of this process's sockets, made at the first call; forked processes share it.

    If the path of the temporary folder is too long for a socket, another writable place is used.

    Raises:
        OSError: no folder can be made anywhere.
    """
    before = tempfile.tempdir
    usual = tempfile.gettempdir()
    try:
        if len(os.fsencode(usual)) > _MOST_CHARACTERS:
            tempfile.tempdir = next((place for place in _SHORT if os.access(place, os.W_OK | os.X_OK)), usual)
        return str(get_temp_dir())
    finally:
        tempfile.tempdir = before
