"""Diagnosis of a hang: which rank the others wait for, why, and what to do about it.

`find_hang` reads no clock and no file, so that tests can call it with any positions of the ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.console.formatting import plural
from paceline.launch.agent.shared_status import BUSY_PHASES, FINISHED_PHASE
from paceline.launch.failures.rank_position import ActivityKind, RankPosition

HangKind = Literal["stopped", "disk", "native", "data", "lock", "code", "mismatch", "connection"]
_STEP_FACTOR, _MIN_SECONDS = 3.0, 2.0
_PATIENT_FACTOR, _MIN_PATIENT_SECONDS = 10.0, 10.0  # for what is often slow: reading data, or a slow network
_ALL_BUSY_FACTOR, _ALL_BUSY_SECONDS = 5.0, 30.0  # for work that all ranks do at the same time
_STOPPED_SECONDS = 0.2
_START_SECONDS = 30.0  # imports, the first batch, the first step
_BUSY_SECONDS = 60.0  # a save, the job's own `on_eval`, or the script's work after the last step
_COMPILE_SECONDS = 600.0
_MAX_NAMED = 4
_KINDS: dict[ActivityKind, HangKind] = {"disk": "disk", "native": "native", "data": "data", "lock": "lock"}

_CAUSES: dict[HangKind, str] = {
    "stopped": "Ctrl-Z, kill -STOP, or a scheduler that pauses",
    "disk": "a disk, a network folder or a device that does not respond",
    "native": "a library in C that loops, or that waits without releasing the GIL",
    "data": "a slow or dead disk, a lock in the dataset, or a data worker that hangs",
    "lock": "a lock that is never released, or a queue or future that nobody serves",
    "code": "code that only this rank runs, or that takes longer on this rank",
    "mismatch": "different code on the ranks, such as `if rank == 0:` around a collective, or a message that was lost",
    "connection": "a connection that drops or delays data, or a GPU operation that never ends",
}


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang. The ranks in `ranks` hang, and those in `waiting` wait for them, for `seconds`.

    With the kinds `mismatch` and `connection`, all ranks wait for each other, and `ranks` has all of them.
    """

    kind: HangKind
    ranks: tuple[RankPosition, ...]
    waiting: tuple[RankPosition, ...] = ()
    seconds: float = 0.0
    step_seconds: float | None = None
    """The median time of a step; None if no step is known."""
    details: str = ""
    """What a data worker of the first rank is doing, as the end of a sentence."""

    @property
    def cause(self) -> str:
        """The likely cause."""
        if self.kind == "code" and not self.waiting:
            return "code that never ends, on every rank"
        if self.kind == "data" and self.ranks[0].stack.user_frames:
            return "a slow or dead disk, or a lock in the dataset"
        return _CAUSES[self.kind]

    @property
    def hint(self) -> str:
        """The command to type, or the thing to do."""
        place = f"on {self.ranks[0].host}: " if self.ranks[0].host else ""
        if self.kind == "stopped":
            here = [position for position in self.ranks if position.host == self.ranks[0].host]
            return f"{place}kill -CONT {' '.join(str(position.pid) for position in here)}"
        if self.kind == "mismatch":
            return "run the same code on every rank, and only print or write on one"
        if self.kind == "connection":
            return "check the connection between these ranks, and their GPUs"
        if self.kind == "disk":
            return f"{place}df and dmesg show whether the disk responds"
        if self.kind == "native":
            return f"{place}py-spy dump --native --pid {self.ranks[0].pid} shows the C code"
        if self.kind == "data":
            workers = "" if self.ranks[0].stack.user_frames else "; --data.workers 0 reads it in the rank itself"
            return f"read the sample in a script{workers}"
        return f"look at that line; {place}py-spy dump --pid {self.ranks[0].pid} (pip install py-spy) shows all threads"

    @property
    def message(self) -> str:
        """The hang in some lines: the ranks, what each does, who waits, the likely cause, and what to do."""
        step = max(position.step for position in (*self.ranks, *self.waiting)) + 1
        usual = "" if self.step_seconds is None else f" (a usual step takes {self.step_seconds:.2g} s)"
        if self.kind in ("mismatch", "connection"):
            head = f"all ranks wait for each other, for {self.seconds:.1f} s{usual}"
        else:
            names = _rank_names(self.ranks)
            head = f"{names} {_is_or_are(self.ranks)} holding up step {step}, for {self.seconds:.1f} s{usual}"
        lines = [f"  {position.name} {position.doing}" for position in self.ranks[:_MAX_NAMED]]
        lines[0] += self.details
        if self.waiting:
            operations = sorted({position.operation for position in self.waiting if position.operation})
            in_text = f" in {' and '.join(operations)}" if operations else ""
            verb = "waits" if len(self.waiting) == 1 else "wait"
            culprits = "it" if len(self.ranks) == 1 else "them"
            lines.append(f"  {_rank_names(self.waiting)} {verb} for {culprits}{in_text}")
        return "\n".join([head, *lines, f"  likely cause: {self.cause}", f"  to do: {self.hint}"])

    def as_json(self) -> dict[str, Any]:
        """Return the hang under the keys of `why --json`."""
        operations = [position.operation for position in (*self.waiting, *self.ranks) if position.operation]
        return {
            "kind": self.kind,
            "ranks": [position.rank for position in self.ranks],
            "waiting": [position.rank for position in self.waiting],
            "seconds": round(self.seconds, 3),
            "line": self.ranks[0].line,
            "operation": operations[0] if operations else "",
            "details": self.details,
            "message": self.message,
            "cause": self.cause,
            "hint": self.hint,
        }


def find_hang(positions: Sequence[RankPosition], *, step_seconds: float | None = None) -> Hang | None:
    """Return the hang that the ranks' positions show, or None.

    `step_seconds` is the median time of a step. Each activity of a rank has a time limit. A rank hangs if another rank
    has waited for it for longer than this limit. If no rank waits, all of them must be silent for five times the limit,
    and at least 30 s. A rank in a debugger does not hang.
    """
    alive = [position for position in positions if not position.has_ended]
    if any(position.is_debugged for position in alive):
        return None
    stopped = [p for p in alive if p.is_stopped and p.silent_seconds > _STOPPED_SECONDS]
    waiting = tuple(p for p in alive if p.is_waiting_for_ranks and not p.is_stopped)
    if stopped:
        return _hang("stopped", stopped, waiting, step_seconds)
    busy = [p for p in alive if not p.is_waiting_for_ranks]
    if not busy:
        return _mutual_wait(alive, step_seconds)
    oldest = min(p.step for p in busy)
    if waiting:
        waited = max(p.silent_seconds for p in waiting)
        late = [p for p in busy if p.step == oldest and min(p.silent_seconds, waited) > _limit(p, step_seconds)]
    else:
        limits = {p.rank: max(_ALL_BUSY_FACTOR * _limit(p, step_seconds), _ALL_BUSY_SECONDS) for p in busy}
        late = [p for p in busy if p.silent_seconds > limits[p.rank]]
        late = late if len(late) == len(alive) else []
    return _hang(_KINDS.get(late[0].activity, "code"), late, waiting, step_seconds) if late else None


def _mutual_wait(alive: Sequence[RankPosition], step_seconds: float | None) -> Hang | None:
    """Return the hang of ranks that all wait for each other."""
    if len(alive) < 2:
        return None
    seconds = min(p.silent_seconds for p in alive)
    is_mismatch = len({p.operation for p in alive}) > 1
    limit = max(_waiting_limit(p, step_seconds) for p in alive)
    if seconds <= limit:
        return None
    return _hang("mismatch" if is_mismatch else "connection", alive, (), step_seconds)


def _hang(
    kind: HangKind, ranks: Sequence[RankPosition], waiting: Sequence[RankPosition], step_seconds: float | None
) -> Hang:
    seconds = max(position.silent_seconds for position in ranks)
    if waiting and kind != "stopped":
        seconds = min(seconds, max(position.silent_seconds for position in waiting))
    return Hang(kind=kind, ranks=tuple(ranks), waiting=tuple(waiting), seconds=seconds, step_seconds=step_seconds)


def _limit(position: RankPosition, step_seconds: float | None) -> float:
    """Return how many seconds a rank may be silent while another rank waits for it."""
    usual = step_seconds or 0.0
    limit = max(_STEP_FACTOR * usual, _MIN_SECONDS)
    if position.is_reading_data:
        limit = max(_PATIENT_FACTOR * usual, _MIN_PATIENT_SECONDS)
    return max(limit, _phase_limit(position))


def _waiting_limit(position: RankPosition, step_seconds: float | None) -> float:
    """Return how many seconds all ranks may wait for each other: a large exchange on a slow network takes long."""
    return max(_PATIENT_FACTOR * (step_seconds or 0.0), _MIN_PATIENT_SECONDS, _phase_limit(position))


def _phase_limit(position: RankPosition) -> float:
    if position.phase == FINISHED_PHASE:
        return math.inf
    if position.is_compiling:
        return _COMPILE_SECONDS
    if position.phase in BUSY_PHASES or position.is_past_last_step:
        return _BUSY_SECONDS
    return 0.0 if position.has_finished_a_step else _START_SECONDS


def _rank_names(positions: Sequence[RankPosition]) -> str:
    ranks = [position.rank for position in positions]
    if len(ranks) > _MAX_NAMED:
        return plural(len(ranks), "rank")
    *head, last = map(str, ranks)
    return f"ranks {', '.join(head)} and {last}" if head else f"rank {last}"


def _is_or_are(positions: Sequence[RankPosition]) -> str:
    return "is" if len(positions) == 1 else "are"
