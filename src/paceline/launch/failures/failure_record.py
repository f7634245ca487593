"""Failure records: the small file that a failing rank writes atomically before it exits."""

import errno
import json
import linecache
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.console.formatting import format_size
from paceline.console.output import flush
from paceline.errors import (
    DataError,
    ExitCode,
    MachineError,
    OutOfMemory,
    PacelineError,
    PeerError,
    Problems,
    RollbackError,
    RunError,
    SaveError,
    SpikeError,
    shorten_text,
    user_line,
)
from paceline.filesystem.atomic_files import write_text
from paceline.filesystem.disk_full import explain_disk_error, is_disk_full
from paceline.launch.agent.shared_status import read_failure_text, write_failure_text
from paceline.launch.failures.oom_detection import (
    explain_data_worker_error,
    is_out_of_memory,
    out_of_memory_error,
    process_bytes_under,
    tightest_memory_limit,
)
from paceline.launch.failures.stack_dumps import Frame
from paceline.launch.inherited_environment import ATTEMPT_FOLDER, own_rank
from paceline.user_code import is_raised_by_user_code

_DISK_FULL_ERRORS = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of a disk that accepts no more data; any other error may have its cause in the user's code."""
TRACEBACK_MARKER = "\x1epaceline: a traceback follows\x1e"
"""A marker line in a rank's log; the console shows the log up to it, and no job prints it by chance."""
FORKSERVER_RANK = -1
FIRST_FAILURE = "first-failure.json"
_MAX_MESSAGE_CHARACTERS = 400
_MAX_SUMMARY_CHARACTERS = 300
TIMEOUT, DIVERGED, CONNECTION, LOST_NODE = "timeout", "apart", "connection", "node"  # values of `error` in --json
_KINDS_IN_WORDS = ("exit", TIMEOUT)  # kinds whose message is a sentence and no exception's text
_PROGRESS_PREFIX = "this rank "
_CLOSED_CONNECTION_TEXTS = (
    "connection closed", "connection reset", "connection abort", "broken pipe", "pair closure",
)  # fmt: skip
_LOST_CONNECTION_TEXTS = (
    "connection closed", "connection reset", "connection abort", "broken pipe", "timed out waiting", "pair closure",
    "recvvalue failed", "socket", "peer", "gloo", "nccl", "could not join the other ranks",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason a rank ended."""

    rank: int
    kind: str
    """The exception's name, or `signal` or `exit` if there is no exception."""
    message: str
    where: str = ""
    """The line in the user's code, if there is one."""
    source: str = ""
    """The text of that line."""
    screen: str = ""
    """The full text for the console."""
    exit_code: int = 1
    monotonic_ns: int = 0
    step: int = 0
    """The step in which the rank failed; 0 before the first."""
    told_by: int | None = None
    """The rank whose log has the full text, if that is another rank."""
    said: dict[str, Any] = field(default_factory=dict)
    """The fields of a `PacelineError`: what, where, cause, hint, numbers."""
    doing: str = ""
    """What the rank had started last, such as the gather of a unit."""
    end_reason: str = ""
    """Why the run was not restarted after this failure, as a line for the screen."""
    host: str = ""
    """The host of the rank, if Paceline has started the run on several nodes."""
    broken_links: list[str] = field(default_factory=list)
    """The links between nodes that did not work when the attempt had ended, as sentences."""
    is_users_own: bool = False
    """Whether the user's own code raised the exception, so that it does not follow from another rank's exit."""

    @property
    def rank_name(self) -> str:
        """The rank, such as "rank 2", or "rank 2 on node1"."""
        return f"rank {self.rank}" + f" on {self.host}" * bool(self.host)

    @property
    def summary(self) -> str:
        """One line for a restart, such as "rank 2 killed by SIGKILL at step 118"; broken links come first."""
        if self.broken_links:
            return "; ".join([*self.broken_links, replace(self, broken_links=[]).summary])
        place, line = (f" at step {self.step}" if self.step else ""), (f" ({self.where})" if self.where else "")
        if self.rank == FORKSERVER_RANK:
            return f"the process that starts the ranks{f' on {self.host}' if self.host else ''} ended{place}"
        if self.kind == "signal":
            memory = " (out of memory)" if self.is_short_of_memory else ""
            return f"{self.rank_name} killed by {self.message.partition(' ')[0]}{memory}{place}"
        first_line = next(iter(self.message.splitlines()), "").strip().rstrip(".:")
        message = shorten_text(first_line, lines=1, width=_MAX_SUMMARY_CHARACTERS)
        if self.is_joint or self.kind in (DIVERGED, CONNECTION, LOST_NODE):
            return message if self.is_joint or self.kind == LOST_NODE else f"{message}{place}"
        if self.is_lost_connection and any(text in message.lower() for text in _CLOSED_CONNECTION_TEXTS):
            return f"{self.rank_name} lost the connection to another rank{place}"
        text = message if self.kind in _KINDS_IN_WORDS or not message else f"{self.kind}: {message}"
        return f"{self.rank_name} failed{place}: {text or self.kind}{line}"

    @property
    def is_joint(self) -> bool:
        """Return whether all ranks have decided this together, so that none of them is to blame."""
        return self.kind in (SpikeError.__name__, RollbackError.__name__)

    @property
    def is_lost_connection(self) -> bool:
        """Return whether the rank only lost its connection, probably because another rank had ended."""
        if self.kind.startswith("Dist") or self.kind == PeerError.__name__:
            return True
        if self.is_users_own or self.kind not in ("RuntimeError", "MachineError"):
            return False
        text = self.message.lower()
        return any(word in text for word in _LOST_CONNECTION_TEXTS)

    @property
    def is_short_of_memory(self) -> bool:
        """Return whether an allocation failed, or the kernel killed this rank for memory."""
        return self.said.get("error") == OutOfMemory.__name__

    @property
    def requested_bytes(self) -> int:
        """The size of the allocation that failed; 0 if it is not known."""
        return int(self.said.get("requested_bytes") or 0)


def write_failure(
    folder: Path, *, rank: int, error: BaseException, step: int = 0, status_fd: int | None = None
) -> None:
    """Write this rank's failure to its file, or to the shared status buffer if the disk is full."""
    failure = failure_from_exception(error, rank=rank, step=step)
    try:
        write_text(failure_path(folder, rank), json.dumps(asdict(failure)))
    except OSError:
        if status_fd is None:
            return
        short = replace(failure, message=failure.message[:_MAX_MESSAGE_CHARACTERS], screen="", source="", said={})
        with suppress(OSError):
            if not write_failure_text(status_fd, rank=rank, text=json.dumps(asdict(failure))):
                write_failure_text(status_fd, rank=rank, text=json.dumps(asdict(short)))


def failure_from_exception(error: BaseException, *, rank: int, step: int = 0) -> Failure:
    """Return the failure record of an exception on this rank."""
    step = step or step_from_notes(error)
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    error = _translate_error(error)
    line = user_line(error)
    return Failure(
        rank=rank,
        kind=type(error).__name__,
        message=_message(error),
        where=str(line) if line else "",
        source=line.text if line else "",
        screen=_screen_text(error) if isinstance(error, PacelineError) else "",
        exit_code=int(error.exit_code) if isinstance(error, PacelineError) else 1,
        monotonic_ns=time.monotonic_ns(),
        step=step,
        said=error.as_json() if isinstance(error, PacelineError) else {},
        is_users_own=is_raised_by_user_code(error),
        doing=next((note.removeprefix(_PROGRESS_PREFIX) for note in notes if note.startswith(_PROGRESS_PREFIX)), ""),
    )


@contextmanager
def annotate_step(number: int) -> Iterator[None]:
    """Add the step's number to an exception that leaves this block, for the failure screen and the traceback."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at step {number}")
        raise


def annotate_progress(error: BaseException, progress: str) -> None:
    """Add to an exception what this rank had started last, for failures in which ranks wait at different places."""
    if progress:
        error.add_note(f"{_PROGRESS_PREFIX}{progress}")


def step_from_notes(error: BaseException) -> int:
    """Return the step in which an exception was raised, from its notes; 0 if they name none."""
    matches = [re.fullmatch(r"at step (\d+)", str(note)) for note in getattr(error, "__notes__", ())]
    return next((int(match[1]) for match in matches if match), 0)


def _message(error: BaseException) -> str:
    """Return the error's message, followed by the replica that raised it if the process runs several replicas."""
    text = error.what if isinstance(error, PacelineError) else _exception_text(error)
    replica_notes = [note for note in getattr(error, "__notes__", ()) if str(note).startswith("in replica ")]
    return f"{text} ({replica_notes[0]})" if replica_notes else text


def _screen_text(error: PacelineError) -> str:
    """Return the error's full text, beginning with a one-line summary."""
    return f"{error.what}.\n{error}" if isinstance(error, Problems) else str(error)


def read_failure(folder: Path, rank: int, *, status_fd: int | None = None) -> Failure | None:
    """Return the failure that a rank recorded, or None if there is no complete record."""
    try:
        return Failure(**json.loads(failure_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass
    try:
        return Failure(**json.loads(read_failure_text(status_fd, rank=rank))) if status_fd is not None else None
    except (OSError, ValueError, TypeError):
        return None


def failure_from_status(rank: int, *, status: int, step: int = 0, is_oom_kill: bool = False) -> Failure:
    """Return the failure of a rank that left no exception, from its signal or exit code.

    `is_oom_kill`: the kernel has killed a process because memory ran out.
    """
    if is_oom_kill and status == -signal.SIGKILL:
        memory_limit = tightest_memory_limit()
        error = OutOfMemory(
            "SIGKILL (killed by the kernel: out of memory).",
            cause=""
            if memory_limit is None
            else f"{memory_limit.name} is limited to {format_size(memory_limit.limit_bytes)}",
            bytes_by_purpose={},
            limit_bytes=None if memory_limit is None else memory_limit.limit_bytes,
        )
        return Failure(
            rank=rank, kind="signal", message=error.what.rstrip("."), screen=str(error), said=error.as_json(),
            monotonic_ns=time.monotonic_ns(), step=step,
        )  # fmt: skip
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        causes: dict[int, str] = {
            signal.SIGKILL: "killed from outside: by the kernel for lack of memory, by a scheduler, or by a user",
            signal.SIGSEGV: "a crash in native code",
            signal.SIGABRT: "native code aborted: the end of the log says why. gloo aborts if ranks do different "
            "things at once, for example if only one rank evaluates, saves or leaves the loop",
        }
        cause = causes.get(-status, "ended by a signal")
        return Failure(
            rank=rank, kind="signal", message=f"{name} ({cause})", monotonic_ns=time.monotonic_ns(), step=step
        )
    if status in (int(ExitCode.DONE), int(ExitCode.STOPPED)):
        return early_exit_failure(rank, status=status, step=step)
    return Failure(
        rank=rank,
        kind="exit",
        message=f"the process exited with code {status} without an exception",
        monotonic_ns=time.monotonic_ns(),
        step=step,
    )


def locate_crash(failure: Failure, frame: Frame) -> Failure:
    """Return the failure of a crash in native code with the line of the job that called it."""
    source = linecache.getline(frame.file, frame.line).strip()
    return replace(failure, where=f"{frame.file}:{frame.line}", source=source)


def missing_status_failure(rank: int, *, step: int = 0) -> Failure:
    """Return the failure of a rank that left no exception, and whose exit code or signal only its launcher knows."""
    return Failure(
        rank=rank,
        kind="exit",
        message="the process ended without an exception: by a signal, such as kill -9, or by os._exit",
        monotonic_ns=time.monotonic_ns(),
        step=step,
    )


def missing_log_failure(rank: int, *, log: Path) -> Failure | None:
    """Return a failure if a rank could not create its log, which is the first thing that a rank does; else None."""
    try:
        log.open("x").close()
    except FileExistsError:
        return None
    except OSError as error:
        cause, hint = explain_disk_error(error, log.parent)
        message = f"the log {log.name} can't be created: {error.strerror}."
        log_error = MachineError(message, where=str(log.parent), cause=cause, hint=hint)
        return failure_from_exception(log_error, rank=rank)
    log.unlink()
    return None


def early_exit_failure(rank: int, *, status: int, step: int = 0) -> Failure:
    """Return the failure of a rank that exited with code 0 (done) or 75 (saved) before the run was finished."""
    error = RunError(
        f"the process exited with code {status} before the run was finished.",
        cause="something in the job called os._exit, or exit() in native code; only Paceline may report a run as "
        + ("done" if status == int(ExitCode.DONE) else "saved"),
        hint="raise an exception there, or remove the call; early_stopping= ends a run by a rule",
    )
    return Failure(
        rank=rank, kind="exit", message=error.what, screen=str(error), monotonic_ns=time.monotonic_ns(), step=step,
        said={**error.as_json(), "error": "exit"},
    )  # fmt: skip


def missing_peer_failure(rank: int, *, waiter: Failure) -> Failure:
    """Return the failure of a rank that exited with code 0 while another rank still waited for it."""
    error = RunError(
        f"the process exited with code 0 while rank {waiter.rank} was still waiting for it.",
        cause="its loop ended before those of the other ranks, or its code called exit; all must do the same steps",
        hint="decide when to leave the loop from values that are equal on all ranks, such as run.step()'s result",
    )
    return replace(
        waiter, rank=rank, kind="exit", message=error.what, screen=str(error), where="", source="",
        said={**error.as_json(), "error": "exit"},
    )  # fmt: skip


def forkserver_failure(status: int | None, *, pid: int, step: int = 0, log_tail: str) -> Failure:
    """Return the failure of a fork server that died before the ranks, which ended with it.

    `status` is None if it is not known.
    """
    exit_failure = failure_from_status(FORKSERVER_RANK, status=-signal.SIGKILL if status is None else status)
    if status is None:
        exit_text = "has ended"
    elif exit_failure.kind == "signal":
        exit_text = f"was ended by {exit_failure.message}"
    else:
        exit_text = f"exited with code {status}"
    message = f"the process that starts the ranks (PID {pid}) {exit_text}, which ended the ranks too."
    screen = "\n".join([message, *(f"  {line}" for line in log_tail.splitlines())])
    return Failure(
        rank=FORKSERVER_RANK,
        kind=exit_failure.kind,
        message=message,
        screen=screen,
        step=step,
        monotonic_ns=exit_failure.monotonic_ns,
    )


def print_traceback(error: BaseException) -> None:
    """Print a marker line and the full traceback to the rank's log; the console shows only the log before the marker.

    The marker is written on a new line, after any unfinished line of the job, and bypasses the job's own streams.
    """
    flush()
    with suppress(OSError):  # the disk may be full
        os.write(1, f"\n{TRACEBACK_MARKER}\n".encode())
        try:
            traceback.print_exception(error)
        except OSError:
            raise
        except Exception:
            traceback.print_tb(error.__traceback__)


def _exception_text(error: BaseException) -> str:
    """Return the exception's text, at most a screen of it; the `str()` of some exceptions itself fails."""
    try:
        text = str(error)
    except Exception as str_error:
        return f"(its message is not available: {type(str_error).__name__})"
    return shorten_text(text)


def _full_folder(error: OSError) -> tuple[Path, str]:
    """Return the folder that has no more space, and the path to print.

    If the error has a filename, the path to print is that of this file, and the folder is the one that contains it. An
    error on writing to an open file has no filename. In that case, return the first full folder among the attempt
    folder, the temporary folder and /dev/shm. The path to print is empty if the folder is unknown.
    """
    if error.filename:
        path = Path(os.fsdecode(error.filename))
        return path.parent, str(path)
    if error.errno == errno.EFBIG:
        return Path(), ""
    candidates = [Path(name) for name in (os.environ.get(ATTEMPT_FOLDER), tempfile.gettempdir(), "/dev/shm") if name]
    for folder in candidates:
        with suppress(OSError):
            if is_disk_full(folder):
                return folder, str(folder)
    return Path(), ""


def _translate_error(error: BaseException) -> BaseException:
    """Return the error as a `PacelineError` if it needs an explanation, else unchanged.

    Four kinds need one: a dead data worker, which torch reports from a signal handler at any line of the rank; a read
    from the terminal; a full disk or a limit on file size; and out of memory.
    """
    if isinstance(error, RuntimeError) and "DataLoader worker" in _exception_text(error):
        cause, hint = explain_data_worker_error(_exception_text(error)) or (
            "it was killed, perhaps for memory, or a library in it crashed",
            "--data.workers 0 shows the error in the rank itself",
        )
        return DataError(f"a data worker died: {error}", cause=cause, hint=hint)
    if type(error).__name__ == "BdbQuit" or (
        isinstance(error, EOFError) and "reading a line" in _exception_text(error)
    ):
        waiting_call = "input()" if isinstance(error, EOFError) else "a debugger, pdb or breakpoint(),"
        terminal_error = RunError(
            f"{waiting_call} waits for terminal input, but a rank has no terminal.",
            cause="ranks are separate processes that print to a log",
            hint="pl.Run(job, ranks=1) in a script, which keeps the terminal; or remote-pdb, in any rank",
        )
        terminal_error.__notes__ = list(getattr(error, "__notes__", ()))
        return terminal_error.with_traceback(error.__traceback__)
    if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRORS:
        folder, where = _full_folder(error)
        cause, hint = explain_disk_error(error, folder)
        save_error = SaveError(f"a file could not be written: {error.strerror}.", where=where, cause=cause, hint=hint)
        save_error.__notes__ = list(getattr(error, "__notes__", ()))
        return save_error.with_traceback(error.__traceback__)
    if is_out_of_memory(error) and not isinstance(error, OutOfMemory):
        memory_limit = tightest_memory_limit()
        return out_of_memory_error(error, held={"this process": process_bytes_under(memory_limit)}, limit=memory_limit)
    return error


def failure_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's failure record in an attempt folder."""
    return folder / f"failure-{rank}.json"


def current_rank() -> int:
    """Return this process's rank from the environment, because a process group may not exist yet."""
    return own_rank(os.environ)
