"""The position of a rank: its step, its process, its stack and its last exchange with other ranks.

The supervisor and `paceline why` observe it from the rank's pages in the attempt folder.
"""

import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.filesystem.atomic_files import read_json, write_json
from paceline.launch.agent.rank_activity import INTERVAL_SECONDS, read_rank_activity
from paceline.launch.agent.shared_status import FINISHED_PHASE, read_heartbeat
from paceline.launch.failures.stack_dumps import Frame, Stack, process_state
from paceline.user_code import is_user_file

_UNWRITTEN_SECONDS = 4 * INTERVAL_SECONDS  # after this time without a new page, native code holds the GIL
_REMOTE, _MAX_AGE_SECONDS = "remote-positions.json", 3.0
_COMPILER_FILES = ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py")
_DEBUGGER_FILES, _DEBUGGER_FOLDERS = frozenset({"pdb.py", "bdb.py"}), ("/debugpy/", "/pydevd", "/remote_pdb")
_LOCK_FILES = frozenset({"threading.py", "queue.py", "synchronize.py"})  # of Python's standard library
_COLLECTIVES_FILE = "/torch/distributed/distributed_c10d.py"
ActivityKind = Literal["stopped", "debugger", "disk", "native", "waiting", "compiling", "data", "lock", "code"]
_TEXTS: dict[ActivityKind, str] = {
    "stopped": "is stopped (state T)",
    "debugger": "is in a debugger",
    "disk": "waits for a disk or a device (state D)",
    "native": "is in native code that holds the GIL",
    "compiling": "compiles the model (torch.compile)",
    "data": "reads its next batch",
    "lock": "waits for a lock",
}
_PHASE_TEXTS = {"save": "is saving", "on_eval": "is in on_eval", FINISHED_PHASE: "has finished its steps"}


@dataclass(frozen=True, kw_only=True)
class RankPosition:
    """The position of one rank at a point in time."""

    rank: int
    pid: int
    state: str = ""
    """The kernel's letter for the state of its process; empty if the process has ended."""
    step: int = 0
    """The last step that it finished."""
    total_steps: int = 0
    """Steps of the whole run; 0 if that is unknown."""
    start_step: int = -1
    """The step from which this attempt started; -1 if the rank has not got that far."""
    phase: str = ""
    """What it does since its last heartbeat: `step`, `save`, `on_eval` or `over`; empty before the first heartbeat."""
    silent_seconds: float = 0.0
    """The time since its last heartbeat, or since the start of the attempt."""
    unwritten_seconds: float = 0.0
    """The time since it last wrote its page."""
    stack: Stack = field(default_factory=Stack)
    num_operations: int = 0
    last_operation: str = ""
    unfinished: tuple[str, ...] = ()
    """The collectives that have not completed, as torch's flight recorder describes them."""
    host: str = ""
    """The machine on which it runs, if that is another one."""

    @property
    def name(self) -> str:
        """The rank, with its machine if that is another one, such as "rank 3 on host2"."""
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self.state in ("Z", "X", "")

    @property
    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        return self.state == "T"

    @property
    def is_debugged(self) -> bool:
        """Return whether a debugger holds the process, or the rank is in Python's debugger."""
        candidates = (frame.file for frame in self.stack.frames if Path(frame.file).name in _DEBUGGER_FILES)
        has_debugger = any(not is_user_file(file) for file in candidates)
        return self.state == "t" or has_debugger or self._has_frame(_DEBUGGER_FOLDERS)

    @property
    def holds_gil(self) -> bool:
        """Return whether the process runs, but its Python threads do not: native code holds the interpreter lock."""
        return self.unwritten_seconds > _UNWRITTEN_SECONDS and self.state not in ("T", "t") and not self.has_ended

    @property
    def is_blocked_on_disk(self) -> bool:
        """Return whether the kernel waits for a disk or a device in a call of this process."""
        return self.state == "D"

    @property
    def is_compiling(self) -> bool:
        """Return whether `torch.compile` is compiling."""
        return self._has_frame(_COMPILER_FILES)

    @property
    def is_reading_data(self) -> bool:
        """Return whether the rank reads its next batch, by itself or from a data worker."""
        return self.stack.is_waiting_for_data or self._has_frame(("/paceline/data/",))

    @property
    def is_waiting_for_lock(self) -> bool:
        """Return whether the rank waits for a lock, a queue or a future of Python."""
        innermost = self.stack.frames[0].file if self.stack.frames else ""
        return Path(innermost).name in _LOCK_FILES and not is_user_file(innermost)

    @property
    def is_waiting_for_ranks(self) -> bool:
        """Return whether the rank waits for other ranks."""
        return self.stack.is_waiting_for_ranks and not self.holds_gil

    @property
    def has_finished_a_step(self) -> bool:
        """Return whether the rank has finished a step in this attempt."""
        return 0 <= self.start_step < self.step

    @property
    def is_past_last_step(self) -> bool:
        """Return whether the rank has finished the last step of the run."""
        return 0 < self.total_steps <= self.step

    @property
    def operation(self) -> str:
        """The exchange with other ranks in which the rank waits, such as `all_reduce`; empty if it does not wait."""
        if not self.is_waiting_for_ranks:
            return ""
        called = (frame.function for frame in self.stack.frames if frame.file.endswith(_COLLECTIVES_FILE))
        return next(called, self.last_operation or "an exchange")

    @property
    def line(self) -> str:
        """The line that the rank executes: the innermost in the user's own code, or else the innermost of all."""
        frames: tuple[Frame, ...] = self.stack.user_frames or self.stack.frames
        return str(frames[0]) if frames else ""

    @property
    def activity(self) -> ActivityKind:
        """The kind of what the rank is doing. As long as it is the same, the rank may be stuck in it."""
        if self.is_stopped:
            return "stopped"
        if self.is_debugged:
            return "debugger"
        if self.is_blocked_on_disk:
            return "disk"
        if self.holds_gil:
            return "native"
        if self.is_waiting_for_ranks:
            return "waiting"
        if self.is_compiling:
            return "compiling"
        if self.is_reading_data:
            return "data"
        return "lock" if self.is_waiting_for_lock else "code"

    @property
    def doing(self) -> str:
        """The end of a sentence that starts with the rank, such as "is stopped (state T)"."""
        if self.has_ended:
            return "has ended"
        activity = self.activity
        if activity == "waiting":
            user_line = f", called from {self.stack.user_frames[0]}" if self.stack.user_frames else ""
            number = f", its exchange number {self.num_operations}" if self.num_operations else ""
            details = f" ({'; '.join(self.unfinished)})" if self.unfinished else ""
            return f"waits for other ranks in {self.operation}{details}{number}{user_line}"
        text = _TEXTS.get(activity, "")
        if activity in ("data", "lock", "code"):  # "is saving" says more than "waits for a lock"
            text = _PHASE_TEXTS.get(self.phase, text)
        if not text:
            return f"is in {self.line}" if self.line else "does not say what it does"
        has_line = bool(self.line) and activity not in ("stopped", "compiling")
        preposition = "; before that, it was in" if activity == "native" else ", in"
        return f"{text}{f'{preposition} {self.line}' * has_line}"

    def _has_frame(self, parts: tuple[str, ...]) -> bool:
        return any(part in frame.file for frame in self.stack.frames for part in parts)

    def as_json(self) -> dict[str, Any]:
        """Return the position under the keys of `why --json`."""
        return {
            "rank": self.rank, "host": self.host, "pid": self.pid,
            "step": self.step, "seconds": round(self.silent_seconds, 3),
            "state": self.state, "phase": self.phase, "doing": self.doing, "line": self.line,
            "operation": self.operation, "num_operations": self.num_operations, "unfinished": list(self.unfinished),
        }  # fmt: skip


def observe_rank(folder: Path, rank: int, *, pid: int = 0) -> RankPosition:
    """Return the position of a rank, from its pages in the attempt folder.

    Its `silent_seconds` are the time since its last heartbeat, or since its start if it has sent none.
    """
    beat, activity = read_heartbeat(folder / f"pulse-{rank}"), read_rank_activity(folder, rank)
    pid = pid or (activity.pid if activity is not None else 0)
    position = RankPosition(rank=rank, pid=pid, state=process_state(pid) if pid else "")
    now = time.monotonic_ns()
    if activity is not None and activity.pid == pid:
        position = replace(
            position,
            unwritten_seconds=(now - activity.monotonic_ns) / 1e9,
            silent_seconds=(now - activity.start_ns) / 1e9,
            stack=activity.stack,
            num_operations=activity.num_operations,
            last_operation=activity.last_operation,
            unfinished=activity.unfinished,
        )
    if beat is not None:
        position = replace(position, start_step=beat.start_step)
    if beat is not None and beat.is_sent:
        position = replace(
            position,
            step=beat.step,
            total_steps=beat.total,
            phase=beat.phase,
            silent_seconds=(now - beat.monotonic_ns) / 1e9,
        )
    return position


def observe_ranks(folder: Path, *, ranks: Container[int]) -> list[RankPosition]:
    """Return the positions of those of `ranks` that have a page in an attempt folder, in rank order.

    `ranks` must not have a rank of another machine, whose process can't be seen from here.
    """
    names = [path.name.removeprefix("activity-") for path in folder.glob("activity-*")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return [observe_rank(folder, rank) for rank in numbers if rank in ranks]


def write_remote_positions(folder: Path, positions: Sequence[RankPosition]) -> None:
    """Write what the ranks of other machines do to the attempt folder, for `paceline why`; not if the disk is full."""
    with suppress(OSError):
        write_json(folder / _REMOTE, {"time": time.time(), "positions": msgspec.to_builtins(positions)})


def read_remote_positions(folder: Path) -> list[RankPosition] | None:
    """Return what the ranks of other machines do now, or None if that is not known, as while all of them train."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        content = read_json(folder / _REMOTE)
        if time.time() - content["time"] < _MAX_AGE_SECONDS:
            return msgspec.convert(content["positions"], list[RankPosition])
    return None
