"""A rank that the others wait for in vain: its last sign of life, and what the kernel says of its process."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import RunError
from paceline.pulse import read_pulse
from paceline.spec.words import many
from paceline.survive.decide import is_lost_connection
from paceline.survive.failure import Failure

TIMEOUT, APART = "timeout", "apart"
_STATES = {
    "T": "is stopped (state T)",
    "t": "is stopped by a debugger (state t)",
    "D": "waits for a disk or a device (state D)",
    "R": "is computing (state R)",
    "S": "is waiting for something (state S)",
    "Z": "has ended (state Z)",
}


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A living rank of which nothing has come; `step` is the last one it finished."""

    rank: int
    pid: int
    step: int
    seconds: float
    state: str

    @property
    def is_stopped(self) -> bool:
        """Whether it can do nothing until somebody lets it."""
        return self.state in ("T", "t")

    def __str__(self) -> str:
        last = f"since step {self.step}, {self.seconds:.0f} s ago" if self.step else "yet, not one step"
        said = f"; its process {self.pid} {_STATES[self.state]}" if self.state in _STATES else ""
        return f"nothing from it {last}{said}"


def find_silent(folder: Path, pids: Mapping[int, int]) -> list[Silent]:
    """The ranks that stand behind: those that are stopped, else those whose last finished step is the oldest."""
    found = [_look(folder, rank, pid) for rank, pid in sorted(pids.items())]
    stopped = [silent for silent in found if silent.is_stopped]
    oldest = min((silent.step for silent in found), default=0)
    return stopped or [silent for silent in found if silent.step == oldest]


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does; empty where it can't be had."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; True where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return True
    return bool(mask >> (number - 1) & 1)


def gave_up(failure: Failure) -> bool:
    """Whether this rank waited for another until its patience ended."""
    text = failure.message.lower()
    return is_lost_connection(failure) and ("timed out" in text or "timeout" in text)


def unanswered(failures: Sequence[Failure], silent: Sequence[Silent]) -> Failure:
    """The failure of whom the others waited for, in words of ours; what the library said stays in a waiter's log.

    Of several exchanges that run at once only the one that timed out says after how long.
    """
    waiter = max(filter(gave_up, failures), key=lambda waiter: _limit(waiter.message))
    first = silent[0]
    ranks = " and ".join(f"rank {one.rank}" for one in silent)
    limit = _limit(waiter.message)
    what = f"no answer from {ranks}{f' within {limit:g} s' if limit else ''}: {first}"
    longer = f"--train.timeout_seconds {2 * limit:.0f}" if limit else "a larger --train.timeout_seconds"
    error = RunError(what, cause=_cause(first), hint=_hint(first, longer))
    said = {**error.as_json(), "error": TIMEOUT}
    return replace(
        waiter, rank=first.rank, kind=TIMEOUT, message=what, screen=str(error), step=first.step + 1,
        told_by=waiter.rank, said=said,
    )  # fmt: skip


def apart(failures: Sequence[Failure]) -> Failure:
    """Where every rank waited for another until the patience of one ended: they wait in different places."""
    waiter = max(filter(gave_up, failures), key=lambda waiter: _limit(waiter.message))
    limit = _limit(waiter.message)
    told = [f"rank {failure.rank} {failure.doing}" for failure in failures if failure.doing]
    what = f"the ranks waited for each other in different places{f', for {limit:g} s' if limit else ''}"
    error = RunError(
        f"{what}: {'; '.join(told[:4])}." if told else f"{what}.",
        cause="a block that only some ranks run (layer drop, a branch on the samples), or other code for one rank",
        hint="--layout zero2 or ddp, where each rank may run other blocks"
        if told
        else "run the same code on every rank",
    )
    said = {**error.as_json(), "error": APART}
    return replace(waiter, kind=APART, message=error.what, screen=str(error), said=said)


def still_waiting(silent: Sequence[Silent], *, seconds: float) -> str:
    """For whoever asked to stop and sees nothing happen."""
    if not silent:
        return f"not one rank has begun after {seconds:.0f} s; Ctrl-C again stops at once"
    again = "Ctrl-C again stops at once and loses the steps since the last save"
    stopped = [one for one in silent if one.is_stopped]
    if stopped:
        again = f"kill -CONT {' '.join(str(one.pid) for one in stopped)} lets it finish; {again}"
    told = "\n".join(f"  rank {one.rank}: {one}" for one in silent[:4])
    return f"still waiting for {many(len(silent), 'rank')} after {seconds:.0f} s:\n{told}\n{again}"


def _look(folder: Path, rank: int, pid: int) -> Silent:
    beat = read_pulse(folder / f"pulse-{rank}")
    known = beat is not None and beat.monotonic_ns
    seconds = (time.monotonic_ns() - beat.monotonic_ns) / 1e9 if beat is not None and known else 0.0
    step = beat.step if beat is not None and known else 0
    return Silent(rank=rank, pid=pid, step=step, seconds=seconds, state=process_state(pid))


def _limit(text: str) -> float:
    """How long it waited, from what the library says; 0 where it does not."""
    for pattern, unit in ((r"(\d+) ?ms\b", 1000), (r"(\d+) ?milliseconds", 1000), (r"after (\d+) seconds", 1)):
        found = re.search(pattern, text)
        if found:
            return int(found[1]) / unit
    return 0.0


def _cause(silent: Silent) -> str:
    if silent.is_stopped:
        return "Ctrl-Z, kill -STOP, a debugger, or a scheduler that pauses"
    if silent.state == "D":
        return "a disk, a network folder or a device that does not answer"
    return "code that only this rank runs, data that take long to read, or a lock that is never free"


def _hint(silent: Silent, longer: str) -> str:
    if silent.is_stopped:
        return f"let it run (kill -CONT PID wakes a stopped process), or {longer} to wait longer"
    return f"{longer} if it is only slow; py-spy dump --pid PID shows where one that hangs is"
