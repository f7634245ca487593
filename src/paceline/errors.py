"""The exception hierarchy: each error says what happened, where, the likely cause, and what to type."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from traceback import extract_stack, extract_tb
from types import FrameType

from typing_extensions import override

from paceline.user_code import is_from_argument_parser, is_user_file


def shorten_text(text: str, *, lines: int = 8, width: int = 400) -> str:
    """Return a text of at most `width` characters unchanged; shorten a longer one.

    Of a longer text, the first `lines` lines are kept. A line with more than `width` characters is cut, and a note in
    this line says how long it was. If lines are omitted, one more line says how many.
    """
    all_lines = text.splitlines() if len(text) > width else [text]
    shown_lines = [
        line if len(line) <= width else f"{line[:width]} ... ({len(line):,} characters)" for line in all_lines[:lines]
    ]
    return "\n".join(
        [*shown_lines, *([f"... {len(all_lines) - lines:,} more lines"] if len(all_lines) > lines else [])]
    )


class ExitCode(IntEnum):
    """Exit codes of the command; fixed, since schedulers and scripts rely on them."""

    DONE = 0
    FAILED = 1
    REFUSED = 2
    MACHINE = 3
    DIFFERENT = 4
    NOT_JUDGED = 5
    STOPPED = 75
    INTERRUPTED = 130


class PacelineError(Exception):
    """The root of all Paceline errors.

    `what` is one sentence; `where` is the user's file and line, a setting or a path; `cause` is the likely reason;
    `hint` is the line to type or the change to make.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, where: str = "", cause: str = "", hint: str = "") -> None:
        what = shorten_text(what, lines=16, width=1000)
        super().__init__(what)
        self.what = what
        self.where = where
        self.cause = cause
        self.hint = hint

    @override
    def __str__(self) -> str:
        labels = (("where", self.where), ("likely cause", self.cause), ("to do", self.hint))
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in labels if text)])

    def as_json(self) -> dict[str, str]:
        """Return the parts of the error for `--json`."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "cause": self.cause,
            "hint": self.hint,
        }


class UsageError(PacelineError):
    """The command line, a file or a setting can't be used as it is."""

    exit_code = ExitCode.REFUSED


class JobError(PacelineError):
    """The job (its file, model, loss, data or optimizer) can't be used as it is."""

    exit_code = ExitCode.REFUSED


class LayoutError(PacelineError):
    """This layout is impossible with this job on these ranks."""

    exit_code = ExitCode.REFUSED


class ResumeError(PacelineError):
    """The run to resume differs from the requested run."""

    exit_code = ExitCode.REFUSED


class CheckpointError(PacelineError):
    """A checkpoint is missing, incomplete or damaged, or belongs to another run."""

    exit_code = ExitCode.REFUSED


class SaveError(CheckpointError):
    """A checkpoint can't be written: no space, or no permission. Once that is solved, the same command resumes."""

    exit_code = ExitCode.MACHINE


class RunError(PacelineError):
    """The run started and failed."""


class DataError(RunError):
    """Reading the data failed, or returned different samples than before."""


class NonFiniteError(RunError):
    """Loss or gradients are not finite, and the run is set to stop in this case. `step` is the step of the failure.

    `no_target` is True if the cause is a loss term without a target. In this case, the inputs of the step are not
    searched for NaN and infinity. `nonfinite_terms` has the microbatches and terms whose loss was not finite, if they
    are known. `ranks` has the ranks of these microbatches.
    """

    step: int | None = None
    no_target: bool = False
    nonfinite_terms: tuple[tuple[int, str], ...] = ()
    ranks: tuple[int, ...] = ()

    @override
    def as_json(self) -> dict[str, object]:  # type: ignore[override]
        """Return the error with the ranks whose loss was not finite."""
        return {**super().as_json(), "ranks": list(self.ranks)}


class SpikeError(RunError):
    """The loss or the gradient norm is far above its usual values, and the run is set to stop in this case."""


class RollbackError(RunError):
    """A step is not finite or a spike, and the run continues from a state before it, without the step's samples."""


class DesyncError(RunError):
    """Replicas that must be equal are not.

    `ranks` has the ranks whose copy is wrong, if a majority of equal copies shows that. `copies` describes an element
    of the weights whose copies differ (`DifferingCopies`), if the weights differ.
    """

    ranks: tuple[int, ...] = ()
    copies: Mapping[str, object] | None = None

    @override
    def as_json(self) -> dict[str, object]:  # type: ignore[override]
        """Return the error with the ranks whose copy is wrong, and the copies."""
        found = {"ranks": list(self.ranks), "copies": self.copies}
        return {**super().as_json(), **{name: value for name, value in found.items() if value}}


class PeerError(RunError):
    """Another rank exited or did not answer, so this rank can't continue. The other rank reports the cause."""


class OutOfMemory(RunError):
    """A rank could not allocate the memory that it needs.

    `bytes_by_purpose` is the memory in use, `limit_bytes` the limit. `part` is the part of the step that failed:
    forward, backward or optimizer. `requested_bytes` is the size of the allocation that failed, if it is known.
    """

    def __init__(
        self,
        what: str,
        *,
        cause: str = "",
        bytes_by_purpose: Mapping[str, int],
        limit_bytes: int | None = None,
        part: str = "",
        requested_bytes: int | None = None,
    ) -> None:
        super().__init__(what, cause=cause)
        self.requested_bytes = requested_bytes
        self.bytes_by_purpose = dict(bytes_by_purpose)
        self.limit_bytes = limit_bytes
        self.part = part

    @override
    def __str__(self) -> str:
        rows = [f"  {name}: {num_bytes / 2**20:,.1f} MiB" for name, num_bytes in self.bytes_by_purpose.items()]
        return "\n".join([super().__str__(), *rows])

    @override
    def as_json(self) -> dict[str, object]:  # type: ignore[override]
        """Return the error with the memory in use."""
        memory = {
            "held": self.bytes_by_purpose,
            "limit_bytes": self.limit_bytes,
            "requested_bytes": self.requested_bytes,
        }
        return {**super().as_json(), **memory, "part": self.part}


class MachineError(PacelineError):
    """The machine lacks something: a device, a port, disk, a library."""

    exit_code = ExitCode.MACHINE


class Problems(PacelineError):
    """Several problems, reported at once."""

    def __init__(self, problems: Sequence[PacelineError]) -> None:
        super().__init__(f"{len(problems)} problems")
        self.problems = tuple(problems)
        self.exit_code = problems[0].exit_code

    @override
    def __str__(self) -> str:
        return "\n".join(f"{number}. {problem}" for number, problem in enumerate(self.problems, 1))

    @override
    def as_json(self) -> dict[str, object]:  # type: ignore[override]
        """Return all problems, in order."""
        return {"error": "Problems", "problems": [problem.as_json() for problem in self.problems]}


def raise_all(problems: Sequence[PacelineError]) -> None:
    """Raise the problem if there is one, or all of them together; return if there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)


def list_problems(error: PacelineError) -> Sequence[PacelineError]:
    """Return the error itself, or the problems that were raised together as this error."""
    return error.problems if isinstance(error, Problems) else (error,)


def job_exit_error(error: SystemExit) -> PacelineError:
    """Return the error for a `sys.exit` in the job's own code, since only the run itself may end the process."""
    line = user_line(error)
    location = f" at {line}" if line else ""
    exit_problem: PacelineError
    if is_from_argument_parser(error):
        exit_problem = JobError(
            f"the job parses command-line arguments{location}, but a job is loaded without any.",
            cause="its parser has a required option",
            hint="make it a parameter, def make_job(lr: float = 0.1), and type --job.lr 0.1",
        )
    else:
        exit_problem = RunError(
            f"the job called sys.exit({'' if error.code is None else repr(error.code)}){location}.",
            cause="the run was not finished, and only the run itself may end it",
            hint="raise an exception there, or remove the call; early_stopping= ends a run by a rule",
        )
    exit_problem.__notes__ = list(getattr(error, "__notes__", ()))
    return exit_problem.with_traceback(error.__traceback__)


@dataclass(frozen=True, kw_only=True)
class UserLine:
    """The innermost line of the user's own code in a traceback."""

    file: str
    line: int
    text: str

    @override
    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_line(error: BaseException) -> UserLine | None:
    """Return the line of the user's code where the error occurred, or None.

    For a syntax error, this is the line with the error, in any file. For any other error, this is the line of the
    innermost frame whose file does not belong to Paceline, an installed package, or Python itself.
    """
    frames = [f for f in extract_tb(error.__traceback__) if is_user_file(f.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        return UserLine(file=error.filename, line=error.lineno or 0, text=(error.text or "").strip())
    if not frames:
        return None
    return UserLine(file=frames[-1].filename, line=frames[-1].lineno or 0, text=(frames[-1].line or "").strip())


def user_code_position() -> object:
    """Return a key of the current operation in the user's own code; the same operation always has the same key."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def one_line_message(error: Exception) -> str:
    """Return one line for an error that is not Paceline's, with the line of the user's own code that raised it."""
    line, message = user_line(error), next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {message}" + (f" ({line})" if line else "")


def current_user_line() -> UserLine | None:
    """Return the line of the user's code that led to this call, or None."""
    frame = next((f for f in reversed(extract_stack()) if is_user_file(f.filename)), None)
    return None if frame is None else UserLine(file=frame.filename, line=frame.lineno or 0, text=frame.line or "")
