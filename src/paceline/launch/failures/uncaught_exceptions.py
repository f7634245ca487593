"""Reports of uncaught exceptions in `pl.Run`, in `pl.place` and in functions such as `pl.train`.

One rank prints the full report, with lines of the user's code. The other ranks print at most one line. Each rank also
writes its text to torchrun's error file. Ranks of Paceline's own launcher do not need this, because its supervisor
reads the failure record of each rank.
"""

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.console.output import print_line
from paceline.errors import ExitCode, PeerError, job_exit_error
from paceline.filesystem.atomic_files import write_text
from paceline.launch.failures.failure_record import Failure, current_rank, failure_from_exception
from paceline.launch.failures.peer_machines import peer_machines
from paceline.launch.failures.single_reporter import ReportScope, claim_report
from paceline.launch.failures.stuck_rank import is_timeout
from paceline.launch.inherited_environment import attempt_folder, own_environ
from paceline.launch.joined_rank import joined_rank
from paceline.user_code import hide_paceline_frames

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LEFT_BLOCK = "_paceline_left"  # attribute of an error that left the block of `remove_hook_at_end`
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class UncaughtHook:
    """An excepthook that reports an exception, and calls the previously installed hook where its output is useful.

    On the rank that prints the full report, the previous hook prints the traceback, unless it is Python's own hook and
    the exception is a `PacelineError`, whose message is printed instead. On other ranks, and if the exception only
    follows from the failure of another rank, Python's own hook is not called. Any other hook is called with its output
    to stderr suppressed. A user's own hook gets the whole traceback, with Paceline's frames.
    """

    def __init__(self, previous_hook: Hook) -> None:
        self._previous_hook = previous_hook
        self.is_active = True

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the exception, and call the previous hook as the class describes.

        An exception that this hook does not report is passed to the previous hook.
        """
        if not (self.is_active or _has_left_block(error)) or not isinstance(error, Exception):
            self._previous_hook(kind, error, trace)
            return
        failure, scope = report_failure(error)
        is_python_hook = self._previous_hook is sys.__excepthook__
        hook_module = str(getattr(self._previous_hook, "__module__", ""))
        if is_python_hook or hook_module.startswith("torch."):  # torch's hook calls Python's
            hide_paceline_frames(error)
        if scope.prints_all and is_python_hook and failure.said:
            print_line(failure_sentence(failure, scope), sys.stderr)
        elif scope.prints_all and not is_echo(failure):
            self._previous_hook(kind, error, error.__traceback__)
        else:
            if not is_python_hook:
                with redirect_stderr(io.StringIO()):
                    self._previous_hook(kind, error, error.__traceback__)
            if scope.prints_line or scope.prints_all:
                print_line(failure_sentence(failure, scope), sys.stderr)

    def remove(self) -> None:
        """Restore the previous hook. If another hook was installed since, this one stays but reports nothing."""
        self.is_active = False
        if sys.excepthook is self:
            sys.excepthook = self._previous_hook

    def restrict_to_error(self, error: BaseException) -> None:
        """Report from now on only this error, which the script may still catch, and errors that it causes."""
        vars(error)[_LEFT_BLOCK] = True
        self.is_active = False


@contextmanager
def remove_hook_at_end(hook: UncaughtHook | None) -> Iterator[None]:
    """Remove the hook at the end of a block; an error that leaves the block is still reported."""
    try:
        yield
    except BaseException as error:
        if hook is not None:
            hook.restrict_to_error(error)
        raise
    if hook is not None:
        hook.remove()


def _has_left_block(error: BaseException | None) -> bool:
    """Return whether the error, or one in its cause chain, has left a block of `remove_hook_at_end`."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        if _LEFT_BLOCK in vars(error):
            return True
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def install_uncaught_hook() -> UncaughtHook | None:
    """Install the hook in front of the current one, until its `remove` is called.

    Return None if such a hook is already active, or if Paceline's launcher started this rank: then its supervisor
    reports the failure.
    """
    current_hook = sys.excepthook
    if attempt_folder(os.environ) is not None or (isinstance(current_hook, UncaughtHook) and current_hook.is_active):
        return None
    if isinstance(current_hook, UncaughtHook):
        current_hook.is_active = True
        return current_hook
    sys.excepthook = hook = UncaughtHook(current_hook)
    return hook


def report_failure(error: BaseException) -> tuple[Failure, ReportScope]:
    """Return the failure of this rank and how much of it to print; also write it to torchrun's error file."""
    failure = name_first_cause(failure_from_exception(error, rank=current_rank()))
    scope = report_scope_of(failure)
    write_error_file(failure, scope, traceback_text="".join(traceback.format_exception(error)))
    return failure, scope


def report_exit(error: SystemExit) -> None:
    """Print that the script called `sys.exit` in a run of several ranks. The other ranks then lose this rank."""
    exit_error = job_exit_error(error)
    message = f"rank {current_rank()} left the run: {exit_error.what}"
    if attempt_folder(os.environ) is None and claim_report(exit_error.what, environ=os.environ).prints_all:
        print_line(message.replace("the job called", "the script called"), sys.stderr)


def is_echo(failure: Failure) -> bool:
    """Return whether the failure is only the lost connection to another rank."""
    return failure.exit_code == ExitCode.FAILED and failure.is_lost_connection


def name_first_cause(failure: Failure) -> Failure:
    """Return the failure with its cause in the message, if this rank only lost the connection to another rank."""
    cause = joined_rank.cause
    if cause is None or not is_echo(failure) or failure.kind == PeerError.__name__:
        return failure
    step_text = f" at step {failure.step}" if failure.step else ""
    reason = f"rank {cause.rank} was killed by {cause.message}" if cause.kind == "signal" else cause.summary
    message = f"rank {failure.rank} stopped{step_text} because {reason}"
    return replace(failure, kind=PeerError.__name__, message=message)


def report_scope_of(failure: Failure) -> ReportScope:
    """Return how much this process prints about its failure."""
    return claim_report(f"{failure.kind}: {failure.message}", environ=os.environ, is_echo=is_echo(failure))


def failure_sentence(failure: Failure, scope: ReportScope) -> str:
    """Return the message that a rank prints. If it only lost another rank, the message says that that rank failed."""
    step_text = f" at step {failure.step}" if failure.step else ""
    if is_echo(failure):
        if failure.kind == PeerError.__name__:
            return failure.message
        if scope.is_already_reported:
            return f"rank {failure.rank} stopped{step_text} because another rank failed; that rank's output says why"
        reason = "another rank did not respond in time"
        if not is_timeout(failure):
            machine = peer_machines.describe(failure.message)
            reason = "another rank failed; that rank's output may say why"
            if machine:
                reason = f"the connection to {machine} was lost; the output there may say why, or the machine is gone"
        return f"rank {failure.rank} stopped{step_text} because {reason} ({failure.kind}: {failure.message})"
    rank_text = f"rank {failure.rank}" if int(own_environ(os.environ).get("WORLD_SIZE", 1)) > 1 else ""
    if not scope.prints_all:
        return f"{rank_text or 'this process'}: {failure.kind}: {failure.message}"
    if failure.exit_code != ExitCode.FAILED:
        summary, *rest = failure.screen.splitlines()
        if failure.where and not any(line.startswith("  where: ") for line in rest):
            rest = [f"  where: {failure.where}", *rest]
        return "\n".join(
            [f"{rank_text if rank_text and failure.exit_code != ExitCode.REFUSED else 'error'}: {summary}", *rest]
        )
    description = ", ".join(filter(None, [rank_text, failure.where, f"{failure.kind}: {failure.message}"]))
    return "\n".join([f"FAILED{step_text}. {description}", *(f"  {line}" for line in failure.screen.splitlines()[1:])])


def write_error_file(failure: Failure, scope: ReportScope, *, traceback_text: str) -> None:
    """Write a failure to torchrun's error file; torchrun shows the rank with the earliest timestamp as the cause."""
    path = own_environ(os.environ).get(ERROR_FILE)
    if not path:
        return
    # Later than the rank that reports the cause, or than torchrun's own time of a killed rank. These are whole seconds.
    delay_seconds = 2 * int(is_echo(failure)) + 2 * int(not scope.prints_all)
    timestamp = int(time.time()) + delay_seconds
    extra = {"timestamp": str(timestamp), "py_callstack": failure_sentence(failure, scope), "traceback": traceback_text}
    message = {"message": failure_sentence(failure, scope), "errorCode": failure.exit_code, "extraInfo": extra}
    with suppress(OSError):
        write_text(Path(path), json.dumps({"message": message}))
