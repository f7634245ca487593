"""Workers that may be lost: where servers have the weights, one that is killed is started again beside the others."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

MOST_LIVES = 3
_POLL_SECONDS = 0.02
_LEAVING_SECONDS = 10.0
_CLEAN = (0, 75)


class RespawningWorkers:
    """The processes of one attempt, of which the first ranks are servers.

    It says `gone RANK STATUS` of an end that is everybody's, as of one that raised an error: it would come again. It
    says `over RANK STATUS` of a worker that ends, however it does, once the servers have ended well, and
    `again RANK STATUS` of one that was killed and is started once more, and `lost RANK STATUS` where that was its
    last life and others go on.
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
            self._say(f"gone {rank} {status}")
        elif self._ends_well:
            self._say(f"over {rank} {status}")
        elif status >= 0 or self._ended:  # a server has failed, and who started us may have ended this one for that
            self._say(f"gone {rank} {status}")
        else:
            self._lost(rank, status)

    def _lost(self, rank: int, status: int) -> None:
        life = self._lives.get(rank, 1) + 1
        if life <= MOST_LIVES:
            self._say(f"again {rank} {status}")
            self._lives[rank] = life
            self._pids[self._again(rank, life)] = rank
        elif any(other >= self._servers for other in self._pids.values()):
            self._say(f"lost {rank} {status}")
        else:
            self._say(f"gone {rank} {status}")

    @property
    def _ends_well(self) -> bool:
        """Whether servers have begun to end, and none badly: then no worker's end matters."""
        return bool(self._ended) and all(status in _CLEAN for status in self._ended.values())

    def _end_late(self) -> None:
        """A worker that is stopped, or was given up, has not heard that it is over."""
        if not self._ends_well or len(self._ended) < self._servers:
            return
        self._over_at = self._over_at or time.monotonic()
        if time.monotonic() - self._over_at > _LEAVING_SECONDS:
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
