"""The agent of one node: starts the workers, forwards signals, and reports which rank failed first."""

import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError
from paceline.launch.agent.shared_status import STATUS_FD, make_status_buffer, read_end, read_pulse, write_stop
from paceline.launch.agent.signals import GENTLE, is_main_thread, stops_here
from paceline.launch.failures.failure_record import (
    Failure,
    exited_early,
    forkserver_ended,
    from_status,
    read_failure,
    without_log,
)
from paceline.launch.failures.first_failure import exit_code, first_failure, is_lost_connection
from paceline.launch.failures.hang_detection import (
    SilentRank,
    divergence_failure,
    find_silent,
    hang_failure,
    is_timeout,
    still_waiting,
)
from paceline.launch.failures.oom_detection import oom_kill_count
from paceline.launch.failures.silent_ranks import DEFAULT_SECONDS, Watcher
from paceline.launch.failures.stack_dumps import begin_stacks, has_signal_handler, process_state

_POLL_SECONDS = 0.05
_NAMING_SECONDS = 0.1
_ANSWER_SECONDS = 1.0
_KILLING_SECONDS = 2.0
_WAKING_SECONDS = 2.0
_PATIENCE_SECONDS = (5.0, 30.0)
_CLEAN = (0, 75)
INHERITED = "PACELINE_INHERITED"
FORKSERVER_COMMAND = "PACELINE_FORKSERVER_COMMAND"


@dataclass
class Attempt:
    """The state of one attempt's workers as the agent sees it."""

    folder: Path
    ranks: int
    pids: dict[int, int] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    silent: list[SilentRank] = field(default_factory=list)
    killed_at: float | None = None

    @property
    def killed_by_us(self) -> bool:
        """Return whether the agent killed the workers."""
        return self.killed_at is not None


class Agent:
    """The supervisor that runs one attempt to its end, and then kills every process that is left of it."""

    def __init__(
        self,
        *,
        command: list[str],
        environ: dict[str, str],
        folder: Path,
        ranks: int,
        saves: bool = True,
        inherited: Sequence[int] = (),
        patience: float = DEFAULT_SECONDS,
        begins_in: str = "",
    ) -> None:
        self._begins_in = begins_in
        self._command = command
        self._environ = environ
        self._attempt = Attempt(folder=folder, ranks=ranks)
        self._saves = saves
        self._inherited = tuple(inherited)
        self._stops = 0
        self._stopped_at: float | None = None
        self._next_word = 0.0
        self._forkserver_pid = 0
        self._status_fd = make_status_buffer()
        begin_stacks(self._status_fd)
        self._watcher = Watcher(folder, status_fd=self._status_fd, seconds=patience) if saves else None
        self._forkserver_checked_at = 0.0
        self._failed_at: float | None = None
        self._killed_for_memory = oom_kill_count()

    def run(self, on_tick: Callable[[], None]) -> tuple[int, Failure | None]:
        """Start the workers, wait, and return the exit code and the first failure; `on_tick` runs every 50 ms."""
        numbers = stops_here() if is_main_thread() else []  # handlers run in no other thread
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        read, write = os.pipe()
        process = subprocess.Popen(
            self._command,
            env={**self._environ, INHERITED: ",".join(map(str, self._inherited)), STATUS_FD: str(self._status_fd)},
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=self._forkserver_log(),
            start_new_session=True,
            cwd=self._begins_in or None,
            pass_fds=(*self._inherited, self._status_fd),
        )
        os.close(write)
        self._forkserver_pid = process.pid
        try:
            self._listen(read, on_tick)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0 if self._is_late() else 30)
        finally:
            self._kill_all(process)
            os.close(read)
            for number, handler in before.items():
                signal.signal(number, self._after(number, signal.SIG_DFL if handler is None else handler))
        try:
            return self._verdict(process.returncode)
        finally:
            os.close(self._status_fd)

    def _listen(self, read: int, on_tick: Callable[[], None]) -> None:
        os.set_blocking(read, False)
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(read, selectors.EVENT_READ)
            while True:
                ready = selector.select(timeout=_POLL_SECONDS)
                data = os.read(read, 65536) if ready else None
                if data == b"":
                    return
                *lines, rest = (rest + (data or b"")).split(b"\n")
                for line in lines:
                    self._heard(line.decode().split())
                on_tick()
                self._after_failure()
                self._after_signal()
                self._after_silence()
                if self._is_late():
                    return

    def _heard(self, words: list[str]) -> None:
        kind, rank, number = words[0], int(words[1]), int(words[2])
        if kind == "born":
            self._attempt.pids[rank] = number
            if self._attempt.killed_by_us:
                self._send(signal.SIGKILL, only=number)
            elif self._stops:
                self._ask_to_stop(rank)  # only this rank: the others were asked when the signal arrived
            return
        self._attempt.pids.pop(rank, None)
        if kind == "again":
            return
        if kind == "lost":
            print_line(f"rank {rank}, a worker, was killed again and is not restarted; the others continue", sys.stderr)
        if kind in ("lost", "over"):
            self._attempt.statuses[rank] = 0
            return
        end = read_end(self._status_fd, rank=rank)
        if end is not None and (number <= 0 or number in _CLEAN):
            self._attempt.statuses[rank] = end  # a crash in Python's shutdown after that does not count
            return
        self._attempt.statuses[rank] = number
        if not self._attempt.killed_by_us:
            self._attempt.failures.append(self._failure(rank, number))
            self._failed_at = self._failed_at or time.monotonic()

    def _failure(self, rank: int, status: int) -> Failure:
        written = read_failure(self._attempt.folder, rank, status_fd=self._status_fd)
        step, kills = self._step_of(rank), oom_kill_count()
        for_memory = kills is not None and kills > (self._killed_for_memory or 0)
        written = written or (without_log(rank, log=self._attempt.folder / f"rank-{rank}.log") if status > 0 else None)
        return written or from_status(rank, status=status, step=step, for_memory=for_memory)

    def _step_of(self, rank: int) -> int:
        """Return the step that a rank was executing; 0 before its first heartbeat."""
        beat = read_pulse(self._attempt.folder / f"pulse-{rank}")
        return beat.step + 1 if beat and beat.monotonic_ns else 0

    def _after_failure(self) -> None:
        """Kill the other ranks, which wait for a dead peer, once they had time to record failures of their own."""
        if self._failed_at is None or self._attempt.killed_by_us:
            return
        waited = any(is_timeout(failure) for failure in self._attempt.failures)
        if time.monotonic() - self._failed_at < (_ANSWER_SECONDS if waited else _NAMING_SECONDS):
            return
        if waited:  # all ranks that timed out as well have recorded it by now
            folder, pids = self._attempt.folder, self._attempt.pids
            mute = {
                rank: pid for rank, pid in pids.items() if read_failure(folder, rank, status_fd=self._status_fd) is None
            }
            self._attempt.silent = find_silent(folder, mute, status_fd=self._status_fd)
        self._kill()

    def _after_silence(self) -> None:
        """Report silent ranks if no rank has failed; end the run if all ranks hang."""
        if self._watcher is None or self._failed_at is not None or self._stops or self._attempt.killed_by_us:
            return
        told, failure = self._watcher.look(self._attempt.pids)
        if told:
            print_line(told, sys.stderr)
        if failure is not None:
            self._attempt.failures.append(failure)
            self._kill()
        self._wake_forkserver()

    def _wake_forkserver(self) -> None:
        """Resume a stopped fork server once all ranks have ended, because it alone reports their exit."""
        now, pids = time.monotonic(), self._attempt.pids.values()
        if now - self._forkserver_checked_at < _WAKING_SECONDS or process_state(self._forkserver_pid) != "T":
            return
        self._forkserver_checked_at = now
        if pids and all(process_state(pid) in ("Z", "") for pid in pids):
            with suppress(ProcessLookupError):
                os.kill(self._forkserver_pid, signal.SIGCONT)

    def _on_signal(self, number: int, _: object) -> None:
        if self._stops and number in GENTLE:
            return
        self._stops += 1
        if self._stops == 1 and (self._saves or number == signal.SIGUSR1):
            for rank in list(self._attempt.pids):
                self._ask_to_stop(rank)
        else:
            self._kill()

    def _ask_to_stop(self, rank: int) -> None:
        """Ask a rank to stop through shared memory, which no handler can block, and by SIGTERM if it handles that."""
        write_stop(self._status_fd, rank=rank)
        if has_signal_handler(self._attempt.pids[rank], signal.SIGTERM):
            self._send(signal.SIGTERM, only=self._attempt.pids[rank])

    def _after(self, number: int, before: Any) -> Any:
        """Return the handler to restore, or SIG_IGN if a late repeat of the signal could still kill the process."""
        is_late = self._stops and number in GENTLE and before == signal.SIG_DFL
        return signal.SIG_IGN if is_late else before

    def _after_signal(self) -> None:
        """Print the progress of a requested stop, which the signal handler can't do: it may interrupt a print."""
        now = time.monotonic()
        if not self._stops or self._attempt.killed_by_us:
            return
        if self._stopped_at is None:
            self._stopped_at, self._next_word = now, now + _PATIENCE_SECONDS[0]
            print_line("stopping: finishing the step, then saving; Ctrl-C again stops at once", sys.stderr)
        elif now >= self._next_word:
            self._next_word = now + _PATIENCE_SECONDS[1]
            print_line(self._waiting(seconds=now - self._stopped_at), sys.stderr)

    def _waiting(self, *, seconds: float) -> str:
        pid = self._forkserver_pid
        if process_state(pid) in ("T", "t"):
            return (
                f"the process {pid} that starts the ranks is stopped: kill -CONT {pid} lets it continue; "
                "Ctrl-C again stops at once"
            )
        return still_waiting(
            find_silent(self._attempt.folder, self._attempt.pids, status_fd=self._status_fd), seconds=seconds
        )

    def _kill(self) -> None:
        self._attempt.killed_at = self._attempt.killed_at or time.monotonic()
        self._send(signal.SIGKILL)

    def _is_late(self) -> bool:
        """Return whether the ranks were killed over 2 s ago; a fork server that is stuck does not report their exit."""
        killed = self._attempt.killed_at
        return killed is not None and time.monotonic() - killed > _KILLING_SECONDS

    def _send(self, number: int, *, only: int | None = None) -> None:
        for pid in [only] if only is not None else list(self._attempt.pids.values()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _kill_all(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill the fork server's process group, to which all processes of the attempt belong."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _forkserver_log(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.open(self._attempt.folder / "forkserver.log", flags, 0o644)

    def _verdict(self, forkserver_status: int) -> tuple[int, Failure | None]:
        attempt = self._attempt
        extra = [read_failure(attempt.folder, rank, status_fd=self._status_fd) for rank in range(attempt.ranks)]
        known = {failure.rank for failure in attempt.failures}
        attempt.failures += [f for f in extra if f is not None and f.rank not in known and attempt.failures]
        first = first_failure(attempt.failures)
        if first is not None and is_lost_connection(first) and attempt.silent:
            return 1, hang_failure(attempt.failures, attempt.silent)
        done = [rank for rank, status in attempt.statuses.items() if status == 0]
        if first is not None and is_lost_connection(first) and done:
            return 1, exited_early(done[0], waiter=first)
        have_met = first is not None and first.kind != MachineError.__name__
        if first is not None and have_met and is_timeout(first) and len(attempt.failures) == attempt.ranks > 1:
            return 1, divergence_failure(sorted(attempt.failures, key=lambda failure: failure.rank))
        if first is None and self._stops > int(self._saves):
            return int(ExitCode.INTERRUPTED), None
        if first is None and len(attempt.statuses) < attempt.ranks:
            step, said = max(map(self._step_of, range(attempt.ranks))), _tail(attempt.folder / "forkserver.log")
            return 1, forkserver_ended(forkserver_status, pid=self._forkserver_pid, step=step, said=said)
        return exit_code(attempt.statuses, first), first


def _tail(path: Path, *, lines: int = 8) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _apart() -> list[str]:
    """Return the Python option that keeps the working folder off the module path, where it could shadow our modules."""
    is_here = Path(__file__).resolve().parents[3] == Path.cwd()
    return [] if is_here else ["-P"]


def forkserver_command(request: Path) -> list[str]:
    """Return the command that starts the fork server.

    `PACELINE_FORKSERVER_COMMAND` overrides it, for example to use a process that has imported torch already.
    """
    words = shlex.split(os.environ.get(FORKSERVER_COMMAND, "")) or [
        sys.executable,
        *_apart(),
        "-m",
        "paceline.launch.agent.forkserver",
    ]
    return [*words, str(request), str(os.getpid())]
