"""Workers that may be lost: where servers have the weights, one that is killed is started again beside the others."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

LIFE = "PACELINE_LIFE"
MOST_LIVES = 3
_POLL_SECONDS = 0.02
_LEAVING_SECONDS = 10.0
_CLEAN = (0, 75)


class Served:
    """The processes of one attempt, of which the first ranks are servers.

    It says `gone RANK STATUS` of an end that is everybody's, as of one that raised an error: it would come again. It
    says `again RANK STATUS` of a worker that was killed and is started once more, and `lost RANK STATUS` where
    that was its last life and others go on.
    """

    def __init__(
        self, pids: dict[int, int], *, servers: int, again: Callable[[int, int], int], say: Callable[[str], None]
    ) -> None:
        self._pids = pids
        self._servers = servers
        self._again = again
        self._say = say
        self._lives: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._over_at: float | None = None

    def wait(self) -> None:
        """Until all are gone."""
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            rank = self._pids.pop(pid, None)
            if rank is not None:
                self._gone(rank, os.waitstatus_to_exitcode(status))
            elif not pid:
                time.sleep(_POLL_SECONDS)
            self._end_late()

    def _gone(self, rank: int, status: int) -> None:
        if rank < self._servers:
            self._ended[rank] = status
        if rank < self._servers or status >= 0:
            self._say(f"gone {rank} {0 if self._is_over and rank >= self._servers else status}")
            return
        life = self._lives.get(rank, 1) + 1
        if not self._ended and life <= MOST_LIVES:
            self._say(f"again {rank} {status}")
            self._lives[rank] = life
            self._pids[self._again(rank, life)] = rank
        elif self._is_over or any(other >= self._servers for other in self._pids.values()):
            self._say(f"lost {rank} {status}")
        else:
            self._say(f"gone {rank} {status}")

    @property
    def _is_over(self) -> bool:
        """Whether the servers have ended, and well: then no worker's end matters."""
        return len(self._ended) == self._servers and all(status in _CLEAN for status in self._ended.values())

    def _end_late(self) -> None:
        """A worker that is stopped, or was given up, has not heard that it is over."""
        if not self._is_over:
            return
        self._over_at = self._over_at or time.monotonic()
        if time.monotonic() - self._over_at > _LEAVING_SECONDS:
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
