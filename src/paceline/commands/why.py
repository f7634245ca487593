"""The `why` verb: explains why a run failed, was stopped or hangs, from its folder and its ranks' activity files."""

import shutil
import sys
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from paceline.checkpoint.files.checkpoint_folder import list_checkpoints
from paceline.checkpoint.files.hf_folder import WEIGHTS_RECORD
from paceline.commands.command_table import VerbOutput, WhyOptions
from paceline.commands.common.resume_command import build_resume_command
from paceline.console.formatting import format_size, plural
from paceline.console.output import print_line
from paceline.errors import UsageError
from paceline.events import StepDone
from paceline.filesystem.run_lock import is_run_folder_locked, lock_holder
from paceline.launch.failures.failure_record import LOST_NODE, Failure
from paceline.launch.failures.hang_diagnosis import Hang, find_hang
from paceline.launch.failures.hang_watch import read_hangs
from paceline.launch.failures.rank_position import RankPosition, observe_ranks, read_remote_positions
from paceline.launch.failures.stack_dumps import process_state
from paceline.launch.run_outcome import (
    STOPPED_AT_ONCE,
    LaunchOutcome,
    can_resume_run,
    describe_resume_point,
    failure_as_json,
    failure_screen,
)
from paceline.launch.several_nodes.node_stays import describe_ranks, lost_node_lines
from paceline.reporting.failures import attempt_lines, newest_failure, newest_training_attempt, read_failures
from paceline.reporting.run_history import History, json_or_none, read_history
from paceline.run_folder.run_folder import RunFolder, find_run, read_task
from paceline.run_folder.signs_of_life import MAX_SILENT_SECONDS, distant_host, silent_seconds

_LIVE_SECONDS = 1.0
_CLEAR_SCREEN = "\x1b[H\x1b[J"
_MAX_LINES = 16
_SILENT_SECONDS = 2.0
_NUM_STEPS = 50
_FULL_DISK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The state of a run and its reason.

    `state` is `running`, `hanging`, `restarting`, `done`, `stopped`, `failed`, `killed`, `not started`, or `unknown` if
    the run's events or logs are lost, or if it was started on another machine and gives no sign of life.
    """

    run: Path
    state: str
    attempt: int = 0
    step: int = 0
    positions: tuple[RankPosition, ...] = ()
    """What the ranks are doing, or were doing when they were killed."""
    hang: Hang | None = None
    hangs: tuple[dict[str, Any], ...] = ()
    """The hangs that were named during the attempt."""
    outcome: LaunchOutcome | None = None
    follow_up: tuple[Failure, ...] = ()
    """The failures of other ranks, which followed from the first."""
    restarts: tuple[str, ...] = ()
    resume_command: str = ""
    resume_point: str = ""
    """From which checkpoint the command continues, as a line; empty on one machine."""
    stopped_command: int = 0
    """The process of the command if a signal has stopped it, else 0."""
    losses: tuple[str, ...] = ()
    """A line about each node that left the attempt."""
    hidden_ranks: range = range(0)
    """The ranks on other nodes, of which nothing is known as long as they train."""
    servers: int = 0
    """The number of parameter servers, which are the first ranks."""
    notes: tuple[str, ...] = ()
    """Lines about an end without a failure, or about records that are lost."""
    distant_lines: tuple[str, ...] = ()
    """Lines about what can't be seen from this machine, because another one has started the run."""

    def as_json(self) -> dict[str, Any]:
        """Return the explanation under the keys of `--json`."""
        failure = failure_as_json(self.outcome) if self.outcome is not None else None
        return {
            "run": str(self.run),
            "state": self.state,
            "attempt": self.attempt,
            "step": self.step,
            "failure": None if failure is None else {k: v for k, v in failure.items() if k != "go_on"},
            "follow_up": [{"rank": other.rank, "what": _follow_up_text(other)} for other in self.follow_up],
            "hang": None if self.hang is None else self.hang.as_json(),
            "hangs": list(self.hangs),
            "ranks": [position.as_json() for position in self.positions],
            "restarts": list(self.restarts),
            "lost_nodes": list(self.losses),
            "not_seen": list(self.distant_lines),
            "go_on": self.resume_command,
        }

    @property
    def text(self) -> str:
        """The explanation as text for the console."""
        head = f"{self.run}: {self.state}, attempt {self.attempt}, step {self.step}"
        lines = [head, *(f"  {line}" for line in (*self.restarts, *self.losses))]
        if self.outcome is not None:
            lines += [failure_screen(self.outcome), *self._follow_up_lines()]
            lines += [f"named before: {' '.join(_first_lines(record))}" for record in self.hangs[-1:]]
        elif self.state == "killed":
            lines += [*self.notes, *self._position_lines("When it ended:")]
        elif self.state in ("unknown", "restarting"):
            lines += self.notes
        elif self.state in ("running", "hanging") and not self.distant_lines:
            lines += [*self._position_lines(""), *self._hidden_lines()]
            lines.append(self.hang.message if self.hang is not None else self._no_hang_text())
        lines += self.distant_lines
        if self.stopped_command:
            lines.append(
                f"The command itself is stopped, so it restarts no rank; kill -CONT {self.stopped_command} continues it"
            )
        if self.resume_command:
            lines += [f"Resume: {self.resume_command}", *([self.resume_point] if self.resume_point else [])]
        return "\n".join(lines)

    def _no_hang_text(self) -> str:
        if not self.positions:
            return "its ranks are starting, or run on several machines, where they are not watched"
        silent = [position for position in self.positions if position.silent_seconds > _SILENT_SECONDS]
        if self.servers:
            return "no hang is looked for: workers of parameter servers do not wait for each other"
        if not silent:
            return "no rank hangs"
        return (
            "no rank is named yet: a rank may be silent for 10 s while it reads data, for 30 s until its first step "
            "ends, and for 60 s in a save or in on_eval; a rank that waits for another one is not to blame"
        )

    def _hidden_lines(self) -> list[str]:
        """Say which ranks are not shown, because they are on other nodes."""
        if not self.hidden_ranks:
            return []
        ranks = describe_ranks(self.hidden_ranks)
        return [f"  {ranks}: on other nodes, which say what their ranks do only when one is silent"]

    def _follow_up_lines(self) -> list[str]:
        lines = [f"  then {_follow_up_text(failure)}" for failure in self.follow_up[:_MAX_LINES]]
        num_hidden = len(self.follow_up) - len(lines)
        return [*lines, *([f"  and {num_hidden} more"] if num_hidden > 0 else [])]

    def _position_lines(self, title: str) -> list[str]:
        has_ended = self.state == "killed"
        lines = [] if not title or not self.positions else [title]
        for position in self.positions[:_MAX_LINES]:
            age = "" if has_ended else f", {position.silent_seconds:.1f} s ago"
            doing = f"in {position.line}" if has_ended else position.doing
            process = "" if has_ended else f" (PID {position.pid})"
            lines.append(f"  {position.name}{process}  step {position.step}{age}  {doing}")
        num_hidden = len(self.positions) - _MAX_LINES
        return [*lines, *([f"  and {plural(num_hidden, 'more rank')}"] if num_hidden > 0 else [])]


def _first_lines(record: dict[str, Any]) -> list[str]:
    """Return the first two lines of a recorded hang: which rank, and what it was doing."""
    return [line.strip() for line in str(record.get("message", "")).splitlines()[:2]]


def _follow_up_text(failure: Failure) -> str:
    if failure.is_lost_connection:
        return f"rank {failure.rank} lost the connection to another rank"
    return failure.summary


def explain_run(run: str | None = None) -> Explanation:
    """Return why a run is in its state; without `run`, the newest run.

    Raises:
        UsageError: there is no such run, or it can't be read.
    """
    folder, _ = find_run(run, only_trained=run is None)
    _check_readable(folder)
    history, attempt = read_history(folder), newest_training_attempt(folder)
    explanation = Explanation(
        run=folder.path,
        state="not started",
        step=history.last_step(),
        restarts=tuple(attempt_lines(history)),
        resume_point=_resume_point(folder),
    )
    if attempt is None:
        return _explain_without_logs(explanation, folder, history)
    number = int(attempt.name.removeprefix("attempt-"))
    losses = tuple(lost_node_lines(folder.path, number))
    explanation = replace(explanation, attempt=number, hangs=tuple(read_hangs(attempt)), losses=losses)
    host, failure = distant_host(folder), newest_failure(history)
    if host:
        explanation = _add_distant_lines(explanation, folder, host=host, failure=failure)
        if explanation.state in ("running", "restarting"):
            return explanation
    elif is_run_folder_locked(folder.path):
        return _explain_running(explanation, folder, attempt, step_seconds=_usual_step_seconds(history))
    if failure is not None:
        others = [_failure(other) for other in read_failures(attempt)[1]]
        return _explain_failed(explanation, folder, attempt, _failure(failure), others)
    if history.has_ended:
        state = str(history.last_event("RunEnded").get("status"))
        return replace(explanation, state=state, resume_command=_resume_command(folder) if state == "stopped" else "")
    if not history.events and (folder.path / WEIGHTS_RECORD).exists():
        return replace(explanation, state="done")
    if not history.events and folder.events.exists() and (history.steps or list_checkpoints(folder.checkpoints)):
        note = f"{folder.events} is empty, so it is not known how the run ended."
        return replace(explanation, state="unknown", notes=(note,), resume_command=_resume_command(folder))
    if host:
        return replace(explanation, state="unknown", resume_command=_resume_command(folder))
    positions = observe_ranks(attempt, ranks=_ranks_here(attempt))
    step = max([explanation.step, *(position.step for position in positions)])
    return replace(
        explanation,
        state="killed",
        step=step,
        positions=tuple(positions),
        notes=_notes_on_sudden_end(folder, attempt),
        resume_command=_resume_command(folder),
    )


def _notes_on_sudden_end(folder: RunFolder, attempt: Path) -> tuple[str, ...]:
    """Return what is known about the end of a run whose command has recorded no failure."""
    if (attempt / STOPPED_AT_ONCE).exists():
        return ("A second stop signal, such as Ctrl-C, ended the ranks at once.",)
    cause = "kill -9, a reboot, the kernel for lack of memory, or a full disk, on which no error can be recorded"
    with suppress(OSError):
        free_bytes = shutil.disk_usage(folder.path).free
        if free_bytes < _FULL_DISK_BYTES:
            cause = f"the disk is full now ({format_size(free_bytes)} are free): on a full disk, no error is recorded"
    return ("The command and its ranks ended without a message.", f"    likely cause: {cause}")


def _explain_without_logs(explanation: Explanation, folder: RunFolder, history: History) -> Explanation:
    """Explain a run that has no attempt folder: it has not started, or somebody has removed its logs."""
    if not history.events and not history.steps and not list_checkpoints(folder.checkpoints):
        return explanation
    if history.has_ended and not is_run_folder_locked(folder.path):
        state = str(history.last_event("RunEnded").get("status"))
        return replace(explanation, state=state, resume_command=_resume_command(folder) if state == "stopped" else "")
    note = f"{folder.logs} is gone or empty, so it is not known what the ranks do or did."
    return replace(explanation, state="unknown", notes=(note,))


def _check_readable(folder: RunFolder) -> None:
    """Check that the records of a run can be read: without them, a wrong reason would be given.

    Raises:
        UsageError: a folder or a file can't be read.
    """
    try:
        for path in (folder.path, folder.logs):
            if path.exists():
                list(path.iterdir())
        if folder.events.exists():
            folder.events.open("rb").close()
    except OSError as error:
        raise UsageError(
            f"{error.filename} can't be read: {error.strerror}.",
            cause="another user has started the run",
            hint=f"the same command as the user who owns it: ls -ld {folder.path}",
        ) from None


def _usual_step_seconds(history: History) -> float | None:
    """Return the median time of the last logged steps, or None."""
    seconds = [event.get("step_seconds") for event in history.events_of_kind(StepDone.__name__)[-_NUM_STEPS:]]
    numbers = [value for value in seconds if isinstance(value, int | float)]
    return median(numbers) if numbers else None


def _ranks_here(attempt: Path) -> Container[int]:
    """Return the ranks of an attempt that can be seen from here: of several nodes, those of node 0."""
    request = json_or_none(attempt / "request.json")
    try:
        return range(request["local_ranks"])
    except (TypeError, KeyError):  # another launcher has started the ranks
        return range(sys.maxsize)


def _add_distant_lines(
    explanation: Explanation, folder: RunFolder, *, host: str, failure: dict[str, Any] | None
) -> Explanation:
    """Add for how long a run of another machine has given no sign of life, and where more can be seen.

    The state stays open if it seems to have ended: after a long silence, or if its nodes have recorded that the head is
    gone.
    """
    seconds = silent_seconds(folder)
    sees_more = f"the same command on {host} shows what its ranks do, which can't be seen from here"
    if seconds > MAX_SILENT_SECONDS or (failure is not None and _is_lost_head(_failure(failure))):
        line = f"no sign of life for {seconds:.0f} s; if it still runs, {sees_more}"
        return replace(explanation, distant_lines=(line,))
    ages = f"the last sign of life is {seconds:.0f} s old; {sees_more}"
    if failure is None:
        return replace(explanation, state="running", distant_lines=(ages,))
    text = f"The ranks have ended ({_failure(failure).summary}), and the command on {host} restarts them, or has ended."
    return replace(explanation, state="restarting", notes=(text,), distant_lines=(ages,))


def _is_lost_head(failure: Failure) -> bool:
    return failure.kind == LOST_NODE and failure.rank == 0


def _explain_running(
    explanation: Explanation, folder: RunFolder, attempt: Path, *, step_seconds: float | None
) -> Explanation:
    holder = lock_holder(folder.path)
    remote = read_remote_positions(attempt)
    positions = [*observe_ranks(attempt, ranks=_ranks_here(attempt)), *(remote or ())]
    content = json_or_none(attempt / "request.json")  # None if another launcher has started the ranks
    request = content if isinstance(content, dict) else {}
    servers = int(request.get("servers") or 0)  # whose workers do not wait for each other
    has_other_nodes = request.get("local_ranks") != request.get("ranks")
    sees_all_ranks = remote is not None or not has_other_nodes
    watches_hangs = not servers and sees_all_ranks
    hang = find_hang(positions, step_seconds=step_seconds) if watches_hangs else None
    if hang is not None and explanation.hangs and explanation.hangs[-1]["ranks"] == hang.as_json()["ranks"]:
        hang = replace(hang, details=explanation.hangs[-1].get("details", ""))
    have_ended = bool(positions) and all(position.has_ended for position in positions)
    first, _ = read_failures(attempt)
    reason = "" if first is None else f" ({_failure(first).summary})"
    pid = int(holder.get("pid") or 0)
    hidden_ranks = range(0) if sees_all_ranks or not positions else range(request["local_ranks"], request["ranks"])
    return replace(
        explanation,
        servers=servers,
        hidden_ranks=hidden_ranks,
        state="restarting" if have_ended else "running" if hang is None else "hanging",
        stopped_command=pid if pid not in (0, *(p.pid for p in positions)) and process_state(pid) == "T" else 0,
        step=max((position.step for position in positions), default=explanation.step),
        positions=tuple(sorted(positions, key=lambda position: position.rank)),
        hang=hang,
        notes=(f"The ranks have ended{reason}, and the command is about to restart them, or to end.",),
    )


def _explain_failed(
    explanation: Explanation, folder: RunFolder, attempt: Path, first: Failure, others: list[Failure]
) -> Explanation:
    request = json_or_none(attempt / "request.json")  # None if another launcher has started the ranks
    num_ranks = request.get("ranks") if isinstance(request, dict) else None
    outcome = LaunchOutcome(
        exit_code=first.exit_code,
        failure=first,
        attempt_folder=attempt,
        seconds=0.0,
        ranks=num_ranks if isinstance(num_ranks, int) else len(list(attempt.glob("rank-*.log"))),
        end_reason=first.end_reason,
    )
    others = [other for other in others if not (first.is_joint and other.kind == first.kind)]
    can_resume = can_resume_run(folder.path, first.exit_code, first)
    return replace(
        explanation,
        state="failed",
        step=max(explanation.step, first.step),
        outcome=outcome,
        follow_up=tuple(others),
        resume_command=_resume_command(folder) if can_resume else "",
    )


def _failure(fields: dict[str, Any]) -> Failure:
    """Return a recorded failure. Fields that another version wrote, or that are damaged, are left out."""
    readable: dict[str, Any] = {"rank": 0, "kind": "", "message": ""}
    for name, value in fields.items():
        with suppress(msgspec.ValidationError):
            msgspec.convert({**readable, name: value}, Failure)
            readable[name] = value
    return msgspec.convert(readable, Failure)


def _resume_command(folder: RunFolder) -> str:
    """Return the command that resumes the run where it lies now; empty if its task can't be read."""
    try:
        task = read_task(folder)
    except UsageError:
        return ""
    is_moved = Path(task.run).resolve() != folder.path.resolve()
    return build_resume_command(replace(task, run=str(folder.path)) if is_moved else task)


def _resume_point(folder: RunFolder) -> str:
    """Return from which checkpoint a run on several nodes continues; empty for other runs."""
    with suppress(UsageError):
        return describe_resume_point(folder) if read_task(folder).nodes else ""
    return ""


def run_verb(options: WhyOptions, _: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    explanation = explain_run(options.run)
    while options.live and not options.json and explanation.state in ("running", "hanging"):
        clear = _CLEAR_SCREEN if sys.stdout.isatty() else ""
        print_line(f"{clear}{explanation.text}")
        time.sleep(_LIVE_SECONDS)
        explanation = explain_run(str(explanation.run))
    return 0, explanation.as_json(), explanation.text
