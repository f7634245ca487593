"""The outcome of a run that this machine launched, and what the screen and `--json` say about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import has_saves, list_checkpoints, parse_step
from paceline.console.formatting import plural
from paceline.errors import ExitCode, PeerError
from paceline.launch.agent.restart_policy import has_external_cause
from paceline.launch.failures.failure_record import (
    CONNECTION,
    DIVERGED,
    FORKSERVER_RANK,
    LOST_NODE,
    TIMEOUT,
    Failure,
)
from paceline.launch.several_nodes.attempt_progress import AttemptProgress
from paceline.run_folder.run_folder import RunFolder

_LINK_HINT = "paceline doctor with the same --nodes tests all links"
STOPPED_AT_ONCE = "stopped-at-once"
"""The file in an attempt folder that says that a second stop signal has ended the ranks."""


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """The result of a run's last attempt: exit code, first failure and time."""

    exit_code: int
    failure: Failure | None
    attempt_folder: Path
    seconds: float
    ranks: int
    progress: AttemptProgress = field(default_factory=AttemptProgress)
    restarts: int = 0
    """How many attempts of this command followed a failed one."""
    end_reason: str = ""
    """Why the run was not restarted once more, as a line for the screen."""

    @property
    def can_resume(self) -> bool:
        """Return whether the same command resumes the run."""
        return can_resume_run(self.attempt_folder.parents[1], self.exit_code, self.failure)


def can_resume_run(run: Path, exit_code: int, failure: Failure | None) -> bool:
    """Return whether the command that started a run resumes it.

    A refused command would be refused again. An error in the job would recur, so the command only helps if there is a
    checkpoint from which a corrected job can continue.
    """
    if exit_code in (ExitCode.DONE, ExitCode.REFUSED):
        return False
    if failure is None or exit_code == ExitCode.MACHINE or has_external_cause(failure):
        return True
    return has_saves(RunFolder(run).checkpoints)


def describe_resume_point(run: RunFolder) -> str:
    """Return the line that says from which checkpoint the resume command continues.

    Checkpoints in memory end with the command, on every node, so it is always one on disk.
    """
    checkpoints = list_checkpoints(run.checkpoints)
    if not checkpoints:
        return f"  it finds no complete checkpoint in {run.checkpoints}"
    return f"  it continues from step {parse_step(checkpoints[-1])} (disk): {checkpoints[-1]}"


def final_message(outcome: LaunchOutcome, *, resume_command: str, extra_lines: Sequence[str] = ()) -> str:
    """Return the final message of a run that failed or was stopped; empty if the run completed.

    `resume_command` is empty if no command resumes the run.
    """
    if outcome.failure is not None:
        return failure_screen(
            outcome, resume_command=resume_command if outcome.can_resume else "", extra_lines=extra_lines
        )
    if outcome.exit_code == ExitCode.STOPPED:
        return f"Stopped and saved. Resume: {resume_command}"
    if outcome.exit_code:
        has_checkpoint = has_saves(RunFolder(outcome.attempt_folder.parents[1]).checkpoints)
        return "Stopped at once." + (
            f" Resume{' from the last save' if has_checkpoint else ''}: {resume_command}" if resume_command else ""
        )
    return ""


def failure_as_json(outcome: LaunchOutcome, *, resume_command: str = "") -> dict[str, Any]:
    """Return the failure under the keys of `--json`; `go_on` is the command that resumes the run."""
    failure = outcome.failure
    if failure is None:
        return {"go_on": resume_command} if resume_command else {}
    return {**_failure_fields(failure), "log": str(_log_path(outcome, failure)), "go_on": resume_command}


def joined_failure_as_json(failure: Failure, *, log: Path | None, resume_command: str = "") -> dict[str, Any]:
    """Return the failure of a rank that another launcher started under the keys of `--json`; `log` is its log."""
    fields = _failure_fields(failure)
    if failure.exit_code == ExitCode.FAILED and failure.is_lost_connection:
        message = (
            f"rank {failure.rank} could not continue because another rank failed or did not respond: {failure.message}"
        )
        fields |= {"error": PeerError.__name__, "what": message, "where": ""}
    return {**fields, "log": str(log or ""), "go_on": resume_command}


def _failure_fields(failure: Failure) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "error": failure.kind,
        "what": failure.message,
        "where": failure.where,
        "cause": "",
        "hint": "",
    }
    fields |= {name: value for name, value in failure.said.items() if value and not (name == "where" and failure.where)}
    if failure.broken_links:
        fields["broken_links"] = failure.broken_links
    return {**fields, "rank": None if failure.rank == FORKSERVER_RANK else failure.rank, "step": failure.step}


def _log_path(outcome: LaunchOutcome, failure: Failure) -> Path:
    """Return the log with the full text; for the fork server, the folder of the ranks' logs."""
    reporting_rank = failure.rank if failure.told_by is None else failure.told_by
    return (
        outcome.attempt_folder
        if failure.rank == FORKSERVER_RANK
        else outcome.attempt_folder / f"rank-{reporting_rank}.log"
    )


def failure_screen(outcome: LaunchOutcome, *, resume_command: str = "", extra_lines: Sequence[str] = ()) -> str:
    """Return the failure screen: the first failed rank, its error, `extra_lines`, and the command that resumes."""
    failure = outcome.failure
    if failure is None:
        return ""
    resume_lines = [f"Resume: {resume_command}"] if resume_command else []
    log = _log_path(outcome, failure)
    if failure.rank == FORKSERVER_RANK:
        end_lines = [outcome.end_reason] if outcome.end_reason else []
        return "\n".join([f"FAILED: {failure.screen}", *end_lines, f"Logs of the ranks: {log}", *resume_lines])
    step_text = f" at step {failure.step}" if failure.step else ""
    location = f"{failure.where}, " if failure.where else ""
    description = f"killed by {failure.message}" if failure.kind == "signal" else f"{failure.kind}: {failure.message}"
    lines = [f"FAILED{step_text}. First error: {failure.rank_name}, {location}{description}"]
    if failure.kind == LOST_NODE:
        lines = [f"FAILED: {failure.message}"]
    elif failure.kind in (TIMEOUT, DIVERGED, CONNECTION):
        lines = [f"FAILED{step_text}: {failure.message}"]
    elif failure.is_joint:
        lines = [f"FAILED{step_text}. {failure.kind}: {failure.message}"]
    elif failure.source:
        lines.append(f"    {failure.source}")
    lines += [f"  {line}" for line in failure.screen.splitlines()[1:]]
    lines += [f"  {link}; {_LINK_HINT}" for link in failure.broken_links]
    num_others, reason = outcome.ranks - 1, "did not respond" if failure.kind == TIMEOUT else "failed"
    if num_others and failure.kind not in (DIVERGED, CONNECTION, LOST_NODE) and not failure.is_joint:
        others = plural(num_others, "rank") if num_others > 1 else "rank"
        lines.append(f"The other {others} stopped because rank {failure.rank} {reason}.")
    log_lines = [] if failure.kind == LOST_NODE else [f"Full text: {log}"]  # what it wrote last says nothing
    lines += [*([outcome.end_reason] if outcome.end_reason else []), *extra_lines, *log_lines]
    return "\n".join([*lines, *resume_lines])
