"""The files of a rank that another launcher started: its log, its activity and its failure.

Under Paceline's own launcher, the fork server and the supervisor make these files. Under torchrun, mpirun or srun each
rank makes its own, from the moment at which rank 0 has numbered the attempt until the run ends. Rank 0 also watches for
hangs, if all ranks are on one machine.
"""

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from paceline.console.output import print_line
from paceline.errors import ExitCode
from paceline.filesystem.atomic_files import write_json
from paceline.launch.agent.process_exit import run_finish
from paceline.launch.agent.rank_activity import activity_path, activity_reporter, read_rank_activity
from paceline.launch.agent.shared_status import read_heartbeat
from paceline.launch.failures.failure_record import (
    Failure,
    failure_from_exception,
    failure_from_status,
    failure_path,
    missing_status_failure,
    read_failure,
    write_failure,
)
from paceline.launch.failures.first_failure import first_failure
from paceline.launch.failures.hang_watch import HangWatch
from paceline.launch.failures.oom_detection import oom_kill_count
from paceline.launch.failures.stack_dumps import exit_status, process_state
from paceline.launch.launcher_variables import JoinedWorld
from paceline.launch.rank_log import RankLog, is_shared_with

_WATCH_SECONDS = 0.25
_LOST_RANK_SECONDS, _POLL_SECONDS = 0.3, 0.02  # from a lost connection to the end of the process that held it


class JoinedRank:
    """The files of this process's rank. Outside of `open` and `close`, nothing is written."""

    def __init__(self) -> None:
        self.redirects_output = False
        """True while this process runs a command of Paceline, and not a script of the user."""
        self.pages: Path | None = None
        """The attempt folder, if the pages in it describe processes of this machine."""
        self.log: Path | None = None
        """The log of the attempt that is open, or that an error has ended."""
        self.cause: Failure | None = None
        """The failure of another rank that ended the attempt; None if it is not known."""
        self._folder: Path | None = None
        self._rank, self._num_ranks, self._is_one_node = 0, 1, True
        self._open_log: RankLog | None = None
        self._watch: _WatchThread | None = None
        self._pid = 0
        self._initial_oom_kills: int | None = None

    def open(self, folder: Path, world: JoinedWorld) -> None:
        """Begin the rank's log and its activity page in an attempt folder. A disk that can't be written is ignored.

        The first save reports such a disk. The output of a command's ranks other than rank 0 is redirected to the log,
        if it would mix with the output of torchrun. That of other ranks is copied to the log.
        """
        self.close(None)
        self._folder, self.cause = folder, None
        self._rank, self._num_ranks, self._is_one_node = world.rank, world.world_size, world.is_one_node
        self._pid, self._initial_oom_kills = os.getpid(), oom_kill_count()
        is_mixed = world.kind == "torchrun" and is_shared_with(os.getppid())
        path = folder / f"rank-{world.rank}.log"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._open_log = RankLog(path, redirects=self.redirects_output and is_mixed and world.rank != 0)
            self.log = path
            self.pages = folder if world.is_one_node else None
        if self.pages is not None:
            activity_reporter.start(activity_path(folder, world.rank))
            if world.rank == 0 and world.world_size > 1:
                self._watch = _WatchThread(folder, num_ranks=world.world_size)
                self._watch.start()

    def close(self, error: BaseException | None) -> None:
        """End the files of this attempt. If an exception ended it, the failure and the traceback are written first."""
        folder, self._folder, self.pages = self._folder, None, None
        if folder is None or os.getpid() != self._pid:  # a process that the job has forked
            return
        if self._watch is not None:
            self._watch.stop()
        activity_reporter.stop()
        is_failure = error is not None and not _is_regular_exit(error)
        if error is not None and is_failure:
            if failure_from_exception(error, rank=self._rank).is_lost_connection:
                self.cause = self._find_cause(folder)  # at once: torchrun soon reads the exit code, and it is gone
            write_failure(folder, rank=self._rank, error=error)
        if self._open_log is not None:
            if error is not None and is_failure:
                self._open_log.write_traceback(error)
            self._open_log.close()
        self._open_log, self._watch = None, None
        self.log = self.log if is_failure else None

    def _find_cause(self, folder: Path) -> Failure | None:
        """Return the failure of another rank because of which this rank has lost a connection; None if it is not known.

        It is the failure that the other rank has recorded. If its process has ended without a record, the failure is
        recorded here, for `paceline why`.
        """
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        deadline = time.monotonic() + _LOST_RANK_SECONDS
        while True:
            failures = [read_failure(folder, rank) or self._record_lost(folder, rank) for rank in others]
            cause = first_failure([failure for failure in failures if failure is not None])
            if cause is not None and not cause.is_lost_connection:
                return cause
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)

    def _record_lost(self, folder: Path, rank: int) -> Failure | None:
        """Record and return the failure of a rank whose process has ended; None if it is alive or elsewhere."""
        failure = self._find_lost(folder, rank) if self._is_one_node else None
        if failure is not None:
            with suppress(OSError):
                write_json(failure_path(folder, rank), asdict(failure))
        return failure

    def _find_lost(self, folder: Path, rank: int) -> Failure | None:
        activity = read_rank_activity(folder, rank)
        if activity is None or not _has_ended(activity.pid):
            return None
        beat, kills = read_heartbeat(folder / f"pulse-{rank}"), oom_kill_count()
        step = beat.step + (beat.phase == "step") if beat is not None and beat.is_sent else 0
        status = exit_status(activity.pid)
        if status is None:
            return missing_status_failure(rank, step=step)
        is_oom_kill = kills is not None and kills > (self._initial_oom_kills or 0)
        return failure_from_status(rank, status=status, step=step, is_oom_kill=is_oom_kill)


joined_rank = JoinedRank()
"""The files of this process, because a process is one rank."""


class _WatchThread:
    """A thread of rank 0 that prints which rank holds up the others, until a rank ends."""

    def __init__(self, folder: Path, *, num_ranks: int) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="paceline-hang-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        watch, pids = HangWatch(self._folder), dict[int, int]()
        with suppress(Exception):  # a run without this watch still trains
            while not self._stopped.wait(_WATCH_SECONDS):
                for rank in range(self._num_ranks):
                    if rank not in pids and (activity := read_rank_activity(self._folder, rank)) is not None:
                        pids[rank] = activity.pid
                if any(map(_has_ended, pids.values())):
                    return
                message = watch.check(pids) if len(pids) == self._num_ranks else ""
                if message and not self._stopped.is_set():
                    print_line(message, sys.stderr)


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, on a system that shows the states of processes."""
    return process_state(pid) in ("Z", "X", "") and bool(process_state(os.getpid()))


def _is_regular_exit(error: BaseException) -> bool:
    """Return whether a script has exited with code 0, or with the code of its finished `pl.Run`."""
    return isinstance(error, SystemExit) and error.code in (None, int(ExitCode.DONE), run_finish.code)
