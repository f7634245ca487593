"""The agent of one node: starts the workers, passes signals on, and says who failed first."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.pulse import read_pulse
from paceline.survive.decide import exit_code, first_failure
from paceline.survive.failure import Failure, from_status, read_failure
from paceline.survive.signals import stops_here

_POLL_SECONDS = 0.05
_NAMING_SECONDS = 0.1
_CLEAN = (0, 75)
INHERITED = "PACELINE_INHERITED"


@dataclass
class Attempt:
    """The workers of one attempt as the agent sees them."""

    folder: Path
    ranks: int
    pids: dict[int, int] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    killed_by_us: bool = False


class Agent:
    """Runs one attempt to its end. Nothing it starts outlives it."""

    def __init__(
        self,
        *,
        command: list[str],
        environ: dict[str, str],
        folder: Path,
        ranks: int,
        saves: bool = True,
        inherited: Sequence[int] = (),
    ) -> None:
        self._command = command
        self._environ = environ
        self._attempt = Attempt(folder=folder, ranks=ranks)
        self._saves = saves
        self._inherited = tuple(inherited)
        self._stops = 0
        self._failed_at: float | None = None

    def run(self, on_tick: Callable[[], None]) -> tuple[int, Failure | None]:
        """Start, wait, and answer with the exit code and the first failure; `on_tick` runs every 50 ms."""
        before = {number: signal.signal(number, self._on_signal) for number in stops_here()}
        read, write = os.pipe()
        process = subprocess.Popen(
            self._command,
            env={**self._environ, INHERITED: ",".join(map(str, self._inherited))},
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=self._nursery_log(),
            start_new_session=True,
            pass_fds=self._inherited,
        )
        os.close(write)
        try:
            self._listen(read, on_tick)
            process.wait(timeout=30)
        finally:
            self._kill_all(process)
            os.close(read)
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._verdict(process.returncode)

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

    def _heard(self, words: list[str]) -> None:
        kind, rank, number = words[0], int(words[1]), int(words[2])
        if kind == "born":
            self._attempt.pids[rank] = number
            if self._attempt.killed_by_us:
                self._send(signal.SIGKILL, only=number)
            elif self._stops:
                self._send(signal.SIGTERM, only=number)  # to this one: for the others it would be the second
            return
        self._attempt.pids.pop(rank, None)
        self._attempt.statuses[rank] = number
        if number not in _CLEAN and not self._attempt.killed_by_us:
            self._attempt.failures.append(self._failure(rank, number))
            self._failed_at = self._failed_at or time.monotonic()

    def _failure(self, rank: int, status: int) -> Failure:
        beat = read_pulse(self._attempt.folder / f"pulse-{rank}")
        written = read_failure(self._attempt.folder, rank)
        return written or from_status(rank, status=status, step=beat.step + 1 if beat and beat.monotonic_ns else 0)

    def _after_failure(self) -> None:
        """Give the others a moment to write down what they saw, then end them: they wait for a dead peer."""
        if self._failed_at is None or self._attempt.killed_by_us:
            return
        if time.monotonic() - self._failed_at < _NAMING_SECONDS:
            return
        self._attempt.killed_by_us = True
        self._send(signal.SIGKILL)

    def _on_signal(self, number: int, _: object) -> None:
        self._stops += 1
        if (self._saves and self._stops == 1) or number == signal.SIGUSR1:
            self._send(signal.SIGTERM)
        else:
            self._attempt.killed_by_us = True
            self._send(signal.SIGKILL)

    def _send(self, number: int, *, only: int | None = None) -> None:
        for pid in [only] if only is not None else list(self._attempt.pids.values()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _kill_all(self, process: "subprocess.Popen[bytes]") -> None:
        """The session is the nursery's own: what is left in it goes with it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _nursery_log(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.open(self._attempt.folder / "nursery.log", flags, 0o644)

    def _verdict(self, nursery_status: int) -> tuple[int, Failure | None]:
        attempt = self._attempt
        extra = [read_failure(attempt.folder, rank) for rank in range(attempt.ranks)]
        known = {failure.rank for failure in attempt.failures}
        attempt.failures += [f for f in extra if f is not None and f.rank not in known and attempt.failures]
        first = first_failure(attempt.failures)
        if first is None and self._stops > int(self._saves):
            return 128 + int(signal.SIGINT), None
        if first is None and len(attempt.statuses) < attempt.ranks:
            return 1, Failure(
                rank=-1,
                kind="exit",
                message=f"the process that starts workers ended early (status {nursery_status})",
                screen=_tail(attempt.folder / "nursery.log"),
            )
        return exit_code(attempt.statuses, first), first


def _tail(path: Path, *, lines: int = 8) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def nursery_command(request: Path) -> list[str]:
    """How the nursery is started."""
    return [sys.executable, "-m", "paceline.survive.nursery", str(request), str(os.getpid())]
