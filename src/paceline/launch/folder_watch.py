"""A watch over the run folder during a training, because its ranks notice only at their next save that it is gone."""

import time
from contextlib import suppress
from pathlib import Path

from paceline.errors import SaveError
from paceline.filesystem.run_lock import FolderIdentity

_CHECK_SECONDS, _PAUSE_SECONDS = 1.0, 0.1


class FolderWatch:
    """The folder of a run that this process has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._identity = FolderIdentity(folder)
        self._check_time = time.monotonic()
        self._has_warned = False

    def is_lost(self) -> bool:
        """Return whether the folder was moved or removed, or another folder has its name.

        A disk that does not answer is no reason to think so, and an answer must be the same after a moment.
        """
        for pause in (0.0, _PAUSE_SECONDS):
            time.sleep(pause)
            try:
                with suppress(FileNotFoundError):
                    self._folder.stat()
                self._identity.check()
            except SaveError:
                continue
            except OSError:
                return False
            return False
        return True

    def warning(self) -> str:
        """Return a warning if the folder is newly lost, else an empty text. It is checked once a second."""
        now = time.monotonic()
        if now - self._check_time < _CHECK_SECONDS:
            return ""
        self._check_time = now
        if not self.is_lost():
            self._has_warned = False
            return ""
        if self._has_warned:
            return ""
        self._has_warned = True
        return (
            f"warning: the run folder {self._folder} was moved or removed. The training continues, but nothing can be "
            "saved there, and it can't be restarted: move the folder back, or press Ctrl-C"
        )
