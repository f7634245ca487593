"""The supervisor of one attempt on one node: it watches the workers, and reports which rank failed first."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError
from paceline.launch.agent.forkserver_client import ForkserverClient, forkserver_log
from paceline.launch.agent.parameter_server_processes import CLEAN_EXIT_CODES
from paceline.launch.agent.shared_status import read_end, read_heartbeat, write_stop
from paceline.launch.agent.stop_requests import StopRequests
from paceline.launch.failures.failure_record import (
    Failure,
    failure_from_status,
    forkserver_failure,
    locate_crash,
    missing_log_failure,
    missing_peer_failure,
    read_failure,
)
from paceline.launch.failures.first_failure import exit_code, first_failure
from paceline.launch.failures.hang_watch import HangWatch
from paceline.launch.failures.missing_heartbeats import DEFAULT_SECONDS, SilenceWatcher
from paceline.launch.failures.oom_detection import oom_kill_count
from paceline.launch.failures.rank_position import RankPosition
from paceline.launch.failures.stack_dumps import (
    CRASH_SIGNALS,
    Stack,
    has_signal_handler,
    process_state,
    read_crash_stack,
)
from paceline.launch.failures.stuck_rank import (
    SilentRank,
    find_silent_ranks,
    hang_failure,
    is_timeout,
    mutual_wait_failure,
    stop_waiting_message,
)

_POLL_SECONDS = 0.05
_RECORD_SECONDS = 0.1  # time for the other ranks to record their failures
_TIMEOUT_RECORD_SECONDS = 1.0  # time for the same if a rank has timed out
_KILL_WAIT_SECONDS, _END_WAIT_SECONDS = 2.0, 30.0
_WAKE_INTERVAL_SECONDS = 2.0
_FORKSERVER_EXIT_SECONDS = 30.0  # from the end of its output to its exit
_STOP_MESSAGE_SECONDS = (5.0, 30.0)  # from the first message to the second; between later messages


@dataclass
class AttemptState:
    """The state of one attempt's workers as the supervisor sees it; `pids` and exit `statuses` are by rank."""

    folder: Path
    ranks: range
    """The ranks that run on this machine."""
    starter: int = 0
    """The PID of the process that forks the workers and reports their exits; 0 before it has started."""
    starter_status: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    silent_ranks: list[SilentRank] = field(default_factory=list)
    kill_time: float | None = None

    @property
    def was_killed_by_supervisor(self) -> bool:
        """Return whether the supervisor killed the workers."""
        return self.kill_time is not None


class Supervisor:
    """The supervisor of one attempt: it has the attempt started, and waits until no process of it is left."""

    def __init__(
        self,
        *,
        forkserver: ForkserverClient,
        request: Path,
        ranks: range,
        stop_requests: StopRequests,
        saves_checkpoints: bool = True,
        silence_timeout: float = DEFAULT_SECONDS,
        watches_hangs: bool = True,
        sees_all_ranks: bool = True,
        remote_positions: Callable[[], Sequence[RankPosition] | None] = tuple,
    ) -> None:
        self._forkserver = forkserver
        self._request = request
        self._attempt = AttemptState(folder=request.parent, ranks=ranks)
        self._stop_requests = stop_requests
        self._saves_checkpoints = saves_checkpoints
        self._silence_timeout = silence_timeout
        self._watches_hangs = watches_hangs
        self._remote_positions = remote_positions
        self._sees_all_ranks = sees_all_ranks
        self._stop_time: float | None = None
        self._next_message_time = 0.0
        self._watcher: SilenceWatcher | None = None
        self._hang_watch: HangWatch | None = None
        self._forkserver_check_time = 0.0
        self._failure_time: float | None = None
        self._num_sigkills = 0
        self._is_ended_from_outside = False
        self._woken_pids: set[int] = set()
        self._initial_oom_kills = oom_kill_count()

    def run(self, on_tick: Callable[[], None]) -> tuple[int, Failure | None]:
        """Start the workers, wait, and return the exit code and the first failure; `on_tick` runs every 50 ms."""
        self._forkserver.start_attempt(self._request)
        if self._saves_checkpoints:
            folder, seconds = self._attempt.folder, self._silence_timeout
            self._watcher = SilenceWatcher(folder, status_fd=self._forkserver.status_fd, seconds=seconds)
            if self._watches_hangs:
                self._hang_watch = HangWatch(folder, status_fd=self._status_fd, remote=self._remote_positions)
        self._stop_requests.on_request = self._on_stop_request
        if self._num_stop_requests > int(self._saves_checkpoints):  # they came before `on_request` was set
            self._kill()
        try:
            if not self._read_events(on_tick):
                self._attempt.starter_status, self._attempt.starter = 0, self._forkserver.pid
                self._forkserver.kill(
                    wait_seconds=0.0 if self._is_kill_overdue() else _FORKSERVER_EXIT_SECONDS,
                    group_seconds=self._group_seconds,
                )
        except BaseException:
            self._forkserver.kill()
            raise
        finally:
            self._stop_requests.on_request = None
        return self._find_result()

    def stop_attempt(self) -> None:
        """Ask all ranks to finish their step, save, and stop."""
        for rank in list(self._attempt.pids):
            self._ask_to_stop(rank)

    def end_attempt(self) -> None:
        """End all ranks of this machine at once, because the attempt has failed on another one.

        The exit code is then 1, and the failure is one that was recorded before, or None.
        """
        self._is_ended_from_outside = True
        self._kill()

    @property
    def pids(self) -> Mapping[int, int]:
        """The processes of the ranks that run, by rank."""
        return self._attempt.pids

    @property
    def _status_fd(self) -> int:
        return self._forkserver.status_fd

    @property
    def _num_stop_requests(self) -> int:
        return self._stop_requests.count

    def _read_events(self, on_tick: Callable[[], None]) -> bool:
        """Handle events until the attempt has ended. Return False if the fork server has ended too, or is stuck."""
        while True:
            try:
                event = self._forkserver.next_event(seconds=_POLL_SECONDS)
                while event:
                    if self._has_attempt_ended(event):
                        return True
                    event = self._forkserver.next_event(seconds=0.0)
            except EOFError:
                return False
            on_tick()
            self._kill_after_failure()
            self._report_stop_progress()
            self._check_silent_ranks()
            self._wake_forkserver()
            if self._is_kill_overdue():
                return False

    def _has_attempt_ended(self, event: list[str]) -> bool:
        """Handle an event, and return whether it ends the attempt. If the fork server was killed, its spare says so."""
        if event[0] == "ended":
            self._attempt.starter_status = int(event[2])
        elif event[0] == "server":
            self._attempt.starter_status, self._attempt.starter = 0, self._forkserver.pid
            self._forkserver.adopt(int(event[2]), group_seconds=self._group_seconds)
        else:
            self._handle_event(event)
        return event[0] in ("ended", "server")

    @property
    def _group_seconds(self) -> float:
        """Return how long to wait until killed processes have ended. A user who asked twice to stop does not wait."""
        return 0.0 if self._num_stop_requests > int(self._saves_checkpoints) else _END_WAIT_SECONDS

    def _handle_event(self, event: list[str]) -> None:
        """Handle a line of the fork server; `RespawningWorkers` documents the kinds of exits."""
        kind, rank, pid_or_status = event[0], int(event[1]), int(event[2])
        if kind == "starter":
            self._attempt.starter = pid_or_status
            return
        if kind == "born":
            self._attempt.pids[rank] = pid_or_status
            if self._attempt.was_killed_by_supervisor:
                self._send(signal.SIGKILL, only_pid=pid_or_status)
            elif self._num_stop_requests:
                self._ask_to_stop(rank)  # only this rank: the others were asked when the signal arrived
            return
        self._attempt.pids.pop(rank, None)
        if kind == "again":
            return
        if kind == "lost" and not self._attempt.was_killed_by_supervisor:
            print_line(f"rank {rank}, a worker, was killed again and is not restarted; the others continue", sys.stderr)
        if kind in ("lost", "over"):
            self._attempt.statuses[rank] = 0
            return
        own_exit_code = read_end(self._status_fd, rank=rank)
        if own_exit_code is not None and (pid_or_status <= 0 or pid_or_status in CLEAN_EXIT_CODES):
            self._attempt.statuses[rank] = own_exit_code  # a later crash in Python's shutdown does not count
            return
        self._attempt.statuses[rank] = pid_or_status
        if not self._attempt.was_killed_by_supervisor:
            self._attempt.failures.append(self._worker_failure(rank, pid_or_status))
            self._failure_time = self._failure_time or time.monotonic()
            self._num_sigkills += pid_or_status == -signal.SIGKILL

    def _worker_failure(self, rank: int, status: int) -> Failure:
        recorded = read_failure(self._attempt.folder, rank, status_fd=self._status_fd)
        step, kills = self._current_step(rank), oom_kill_count()
        is_oom_kill = kills is not None and kills > (self._initial_oom_kills or 0)
        recorded = recorded or (
            missing_log_failure(rank, log=self._attempt.folder / f"rank-{rank}.log") if status > 0 else None
        )
        if recorded is not None:
            return recorded
        failure = failure_from_status(rank, status=status, step=step, is_oom_kill=is_oom_kill)
        log = self._attempt.folder / f"rank-{rank}.log"
        crash_stack = read_crash_stack(log) if -status in CRASH_SIGNALS else Stack()
        return failure if not crash_stack.user_frames else locate_crash(failure, crash_stack.user_frames[0])

    def _current_step(self, rank: int) -> int:
        """Return the step that a rank was executing, or was saving; 0 before its first heartbeat."""
        beat = read_heartbeat(self._attempt.folder / f"pulse-{rank}")
        return beat.step + (beat.phase == "step") if beat and beat.monotonic_ns else 0

    def _kill_after_failure(self) -> None:
        """Kill the other ranks, which wait for a dead peer, once they have had time to record their own failures.

        SIGKILLs seldom follow from another failure, so nothing needs to be recorded if there is nothing else.
        """
        if self._failure_time is None or self._attempt.was_killed_by_supervisor:
            return
        has_timeout = any(is_timeout(failure) for failure in self._attempt.failures)
        record_seconds = _TIMEOUT_RECORD_SECONDS if has_timeout else _RECORD_SECONDS
        was_only_killed = self._num_sigkills == len(self._attempt.failures)
        if not was_only_killed and time.monotonic() - self._failure_time < record_seconds:
            return
        if has_timeout:  # by now, every rank that timed out has recorded its failure
            folder, pids = self._attempt.folder, self._attempt.pids
            unrecorded = {
                rank: pid for rank, pid in pids.items() if read_failure(folder, rank, status_fd=self._status_fd) is None
            }
            self._attempt.silent_ranks = find_silent_ranks(folder, unrecorded, status_fd=self._status_fd)
        self._kill()

    def _check_silent_ranks(self) -> None:
        """Report hanging and silent ranks if no rank has failed; end the run if all ranks hang."""
        if (
            self._watcher is None
            or self._failure_time is not None
            or self._num_stop_requests
            or self._attempt.was_killed_by_supervisor
        ):
            return
        notice, failure = self._watcher.check(self._attempt.pids)
        for text in filter(None, (self._hang_notice(), notice)):
            print_line(text, sys.stderr)
        if failure is not None:
            self._attempt.failures.append(failure)
            self._kill()

    def _hang_notice(self) -> str:
        """Return the message of the watch for hangs. An error in it turns it off, and does not end the run."""
        try:
            return "" if self._hang_watch is None else self._hang_watch.check(self._attempt.pids)
        except Exception as error:
            self._hang_watch = None
            return f"hangs are no longer watched in this attempt: {type(error).__name__}: {error}"

    def _wake_forkserver(self) -> None:
        """Resume a stopped fork server or starter once a rank has ended, because only they report exits.

        If a user has asked to stop, a message about the stopped process appears instead.
        """
        now, pids = time.monotonic(), self._attempt.pids.values()
        if now - self._forkserver_check_time < _WAKE_INTERVAL_SECONDS or self._num_stop_requests:
            return
        self._forkserver_check_time = now
        stopped_pid = self._stopped_forkserver_pid()
        if stopped_pid and (not pids or any(process_state(pid) in ("Z", "") for pid in pids)):
            if stopped_pid not in self._woken_pids:
                text = f"process {stopped_pid}, which starts the ranks, was stopped; Paceline continues it"
                print_line(text, sys.stderr)
            self._woken_pids.add(stopped_pid)
            with suppress(ProcessLookupError):
                os.kill(stopped_pid, signal.SIGCONT)

    def _stopped_forkserver_pid(self) -> int:
        """Return the PID of the fork server, or of the starter, if it is stopped; 0 if both run."""
        pids = filter(None, (self._forkserver.pid, self._attempt.starter))
        return next((pid for pid in pids if process_state(pid) in ("T", "t")), 0)

    def _on_stop_request(self, number: int) -> None:
        if self._num_stop_requests == 1 and (self._saves_checkpoints or number == signal.SIGUSR1):
            self.stop_attempt()
        else:
            self._kill()

    def _ask_to_stop(self, rank: int) -> None:
        """Ask a rank to stop: in shared memory, which no handler can block, and by SIGTERM if the rank handles it."""
        write_stop(self._status_fd, rank=rank)
        if has_signal_handler(self._attempt.pids[rank], signal.SIGTERM):
            self._send(signal.SIGTERM, only_pid=self._attempt.pids[rank])

    def _report_stop_progress(self) -> None:
        """Print the progress of a requested stop. A signal handler can't print, because it may interrupt a print."""
        now = time.monotonic()
        if not self._num_stop_requests or self._attempt.was_killed_by_supervisor:
            return
        if self._stop_time is None:
            self._stop_time, self._next_message_time = now, now + _STOP_MESSAGE_SECONDS[0]
            print_line("stopping: finishing the step, then saving; Ctrl-C again stops at once", sys.stderr)
        elif now >= self._next_message_time:
            self._next_message_time = now + _STOP_MESSAGE_SECONDS[1]
            print_line(self._waiting_message(seconds=now - self._stop_time), sys.stderr)

    def _waiting_message(self, *, seconds: float) -> str:
        pid = self._stopped_forkserver_pid()
        if pid:
            return (
                f"the process {pid} that starts the ranks is stopped: kill -CONT {pid} lets it continue; "
                "Ctrl-C again stops at once"
            )
        return stop_waiting_message(
            find_silent_ranks(self._attempt.folder, self._attempt.pids, status_fd=self._status_fd), seconds=seconds
        )

    def _kill(self) -> None:
        self._attempt.kill_time = self._attempt.kill_time or time.monotonic()
        self._send(signal.SIGKILL)

    def _is_kill_overdue(self) -> bool:
        """Return whether the ranks should have ended long ago; a fork server that is stuck does not report their exit.

        A user who asked twice to stop waits only 2 s. Otherwise, the next attempt needs their memory and files.
        """
        killed, limit = self._attempt.kill_time, _KILL_WAIT_SECONDS if self._num_stop_requests else _END_WAIT_SECONDS
        return killed is not None and time.monotonic() - killed > limit

    def _send(self, number: int, *, only_pid: int | None = None) -> None:
        for pid in [only_pid] if only_pid is not None else list(self._attempt.pids.values()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _find_result(self) -> tuple[int, Failure | None]:
        """Return the exit code and the failure to report, from the failures and statuses of all ranks."""
        attempt = self._attempt
        records = [read_failure(attempt.folder, rank, status_fd=self._status_fd) for rank in attempt.ranks]
        failed_ranks = {failure.rank for failure in attempt.failures}
        if attempt.failures or self._is_ended_from_outside:
            attempt.failures += [record for record in records if record is not None and record.rank not in failed_ranks]
        first = first_failure(attempt.failures)
        if first is not None and first.is_lost_connection and attempt.silent_ranks:
            return 1, hang_failure(attempt.failures, attempt.silent_ranks)
        finished_ranks = [rank for rank, status in attempt.statuses.items() if status == 0]
        if first is not None and first.is_lost_connection and finished_ranks and self._sees_all_ranks:
            return 1, missing_peer_failure(finished_ranks[0], waiter=first)
        have_connected = first is not None and first.kind != MachineError.__name__
        have_all_failed = len(attempt.failures) == len(attempt.ranks) > 1 and self._sees_all_ranks
        if first is not None and have_connected and is_timeout(first) and have_all_failed:
            failures = sorted(attempt.failures, key=lambda failure: failure.rank)
            return 1, mutual_wait_failure(failures, folder=attempt.folder)
        if first is None and self._num_stop_requests > int(self._saves_checkpoints):
            return int(ExitCode.INTERRUPTED), None
        if first is None and self._is_ended_from_outside:
            return 1, None
        if first is None and len(attempt.statuses) < len(attempt.ranks):
            step, log_tail = max(map(self._current_step, attempt.ranks)), _tail(forkserver_log(self._request))
            status = attempt.starter_status or self._forkserver.exit_status
            return 1, forkserver_failure(status, pid=attempt.starter, step=step, log_tail=log_tail)
        return exit_code(attempt.statuses, first), first


def _tail(path: Path, *, lines: int = 8) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
