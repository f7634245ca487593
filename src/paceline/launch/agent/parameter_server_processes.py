"""Restart of lost workers: when servers hold the weights, a killed worker is restarted while the others continue."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

MAX_STARTS = 3
_POLL_SECONDS = 0.02
_EXIT_SECONDS = 10.0
CLEAN_EXIT_CODES = (0, 75)  # done; stopped and saved


class RespawningWorkers:
    """The worker processes of one attempt, of which the first ranks are servers.

    `pids` maps PIDs to ranks. `restart(rank, start_number)` forks a worker again and returns its PID.

    `report` gets one of these lines for each exit:
    `gone RANK STATUS`: a process exited and is not restarted; a failure ends the run;
    `over RANK STATUS`: a worker exited after a server had ended cleanly, so its status does not matter;
    `again RANK STATUS`: a worker was killed and is restarted;
    `lost RANK STATUS`: a worker was killed after its last allowed start, and the other workers continue.
    """

    def __init__(
        self, pids: dict[int, int], *, servers: int, restart: Callable[[int, int], int], report: Callable[[str], None]
    ) -> None:
        self._pids = pids
        self._servers = servers
        self._restart = restart
        self._report = report
        self._starts: dict[int, int] = {}
        self._server_statuses: dict[int, int] = {}
        self._servers_end_time: float | None = None

    def wait(self) -> None:
        """Wait until all processes have ended."""
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            rank = self._pids.pop(pid, None)
            if rank is not None:
                self._handle_exit(rank, os.waitstatus_to_exitcode(status))
            elif not pid:
                time.sleep(_POLL_SECONDS)
            self._kill_overdue_workers()

    def _handle_exit(self, rank: int, status: int) -> None:
        if rank < self._servers:
            self._server_statuses[rank] = status
            self._report(f"gone {rank} {status}")
        elif self._have_servers_succeeded:
            self._report(f"over {rank} {status}")
        elif status >= 0 or self._server_statuses:  # a server failed: the supervisor may have killed this worker
            self._report(f"gone {rank} {status}")
        else:
            self._handle_killed_worker(rank, status)

    def _handle_killed_worker(self, rank: int, status: int) -> None:
        start_number = self._starts.get(rank, 1) + 1
        if start_number <= MAX_STARTS:
            self._report(f"again {rank} {status}")
            self._starts[rank] = start_number
            self._pids[self._restart(rank, start_number)] = rank
        elif any(other >= self._servers for other in self._pids.values()):
            self._report(f"lost {rank} {status}")
        else:
            self._report(f"gone {rank} {status}")

    @property
    def _have_servers_succeeded(self) -> bool:
        """Return whether a server has ended and no server has failed: then a worker's exit status does not matter."""
        return bool(self._server_statuses) and all(
            status in CLEAN_EXIT_CODES for status in self._server_statuses.values()
        )

    def _kill_overdue_workers(self) -> None:
        """Kill workers that still run 10 s after the last server ended, for example because SIGSTOP stopped them."""
        if not self._have_servers_succeeded or len(self._server_statuses) < self._servers:
            return
        self._servers_end_time = self._servers_end_time or time.monotonic()
        if time.monotonic() - self._servers_end_time > _EXIT_SECONDS:
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
