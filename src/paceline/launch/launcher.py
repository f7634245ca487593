"""The launcher: starts the processes of an attempt, which read their task from a file, and returns how they ended."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import LATEST, has_saves, parse_step, resolve_mark
from paceline.config.secret_settings import holds_secret
from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, PeerError, UsageError
from paceline.filesystem.atomic_files import report_write_errors, write_json
from paceline.filesystem.run_lock import RunLock, lock_run_folder
from paceline.launch.agent.supervisor import Supervisor, forkserver_command
from paceline.launch.failures.failure_record import FIRST_FAILURE, FORKSERVER_RANK, Failure
from paceline.launch.failures.first_failure import is_lost_connection
from paceline.launch.failures.missing_heartbeats import DEFAULT_SECONDS
from paceline.launch.failures.stuck_rank import DIVERGED, TIMEOUT
from paceline.launch.rendezvous import listen_on_free_port
from paceline.run_folder.run_folder import RunFolder

_MATH_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KERNELS_VARIABLE = "MKL_CBWR"  # with which MKL selects its kernels
DEFAULT_EXACT_KERNELS = "AVX2"
_MAX_RESTARTS = 3


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The description of what to start: an entry (`"pkg.module:function"`) with a payload, or the user's own script.

    With `saves_checkpoints`, the run folder is locked, and the first stop signal asks the ranks to finish their step
    and save. Without `saves_checkpoints`, only SIGUSR1 asks the ranks to stop, and any other stop signal kills them. If
    `servers` is positive, the first `servers` ranks are parameter servers, and any other rank that is killed is
    restarted alone.
    """

    ranks: int
    run: RunFolder
    entry: str = ""
    payload: dict[str, Any] | None = None
    script: list[str] | None = None
    threads: int = 1
    exact: bool = False
    saves_checkpoints: bool = True
    servers: int = 0
    working_folder: str = ""
    """The working folder of the ranks; if empty, the one of this process."""


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """The result of one attempt: exit code, first failure and time."""

    exit_code: int
    failure: Failure | None
    attempt_folder: Path
    seconds: float
    ranks: int

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


def has_external_cause(failure: Failure) -> bool:
    """Return whether the cause may be outside the job: a signal, low memory, a slow rank, or the fork server."""
    has_external_kind = failure.kind in ("signal", TIMEOUT) or failure.rank == FORKSERVER_RANK
    return has_external_kind or failure.is_short_of_memory or is_lost_connection(failure)


def start(request: LaunchRequest, *, on_start: Callable[[Path], Callable[[], None]] | None = None) -> LaunchOutcome:
    """Run one attempt to its end. If a parameter server is killed, run another attempt, up to three times.

    `on_start(attempt_folder)` returns a function that is called every 50 ms.

    Raises:
        UsageError: the request saves checkpoints, and another run has locked the run folder.
        MachineError: the ranks could not reach each other on this machine.
    """
    if request.ranks > 1:
        listen_on_free_port().close()  # fail early: the fork server would find out only after it imported torch
    run_lock = lock_run_folder(request.run.path, on_wait=print_line) if request.saves_checkpoints else None
    try:
        outcome = _run_attempt(request, on_start, run_lock)
        for _ in range(_MAX_RESTARTS):
            if not _has_lost_server(outcome, request):
                break
            request = _restart_request(request, outcome)
            outcome = _run_attempt(request, on_start, run_lock)
        return outcome
    finally:
        if run_lock is not None:
            run_lock.close()


def _run_attempt(
    request: LaunchRequest, on_start: Callable[[Path], Callable[[], None]] | None, run_lock: RunLock | None
) -> LaunchOutcome:
    """Start the ranks of one attempt, wait until they end, and store the first failure in the attempt folder."""
    start_time = time.monotonic()
    attempt = request.run.next_attempt()
    folder = request.run.attempt_folder(attempt)
    payload = {**(request.payload or {}), "attempt": attempt}
    with report_write_errors(request.run.path):
        folder.mkdir(parents=True)
        write_json(
            folder / "request.json",
            {
                "entry": request.entry,
                "payload": payload,
                "script": request.script,
                "ranks": request.ranks,
                "threads": request.threads,
                "folder": str(folder.resolve()),
                "servers": request.servers,
            },
            private=holds_secret(payload.get("settings", ())),
        )
    tick = on_start(folder) if on_start else _do_nothing
    supervisor = Supervisor(
        command=forkserver_command((folder / "request.json").resolve()),
        working_folder=request.working_folder,
        environ=_environ(request),
        folder=folder,
        ranks=request.ranks,
        saves_checkpoints=request.saves_checkpoints,
        inherited_handles=_inherited_handles(run_lock, payload),
        silence_timeout=_silence_timeout(request),
    )
    code, failure = supervisor.run(tick)
    tick()
    if failure is not None:
        with suppress(OSError):
            write_json(folder / FIRST_FAILURE, asdict(failure))
    seconds = time.monotonic() - start_time
    return LaunchOutcome(exit_code=code, failure=failure, attempt_folder=folder, seconds=seconds, ranks=request.ranks)


def _inherited_handles(run_lock: RunLock | None, payload: Mapping[str, Any]) -> list[int]:
    """Return the file handles that the ranks inherit: the run's lock, and the file of a job passed as an object."""
    handles = [None if run_lock is None else run_lock.handle, payload.get("job_handle")]
    return [handle for handle in handles if handle is not None]


def _silence_timeout(request: LaunchRequest) -> float:
    """Return the timeout of the request's settings in seconds, or the default; heartbeats contain the job's timeout."""
    timeout = (request.payload or {}).get("settings", {}).get("train.timeout_seconds", DEFAULT_SECONDS)
    try:
        return float(timeout)
    except (TypeError, ValueError):
        return DEFAULT_SECONDS


def _has_lost_server(outcome: LaunchOutcome, request: LaunchRequest) -> bool:
    """Return whether a signal killed a parameter server; it can restart, because checkpoints contain all its state."""
    failure = outcome.failure
    return failure is not None and failure.kind == "signal" and 0 <= failure.rank < request.servers


def _restart_request(request: LaunchRequest, outcome: LaunchOutcome) -> LaunchRequest:
    """Return the request for the next attempt, and print how many steps are repeated.

    With `resume=None`, the next attempt continues from the newest checkpoint of the run folder. If the folder has no
    checkpoint, the next attempt starts as the last one did.
    """
    assert outcome.failure is not None
    newest, step = resolve_mark(request.run.checkpoints, LATEST), max(0, outcome.failure.step - 1)
    description = f"rank {outcome.failure.rank}, a server, was killed ({outcome.failure.message.partition(' ')[0]})"
    if newest is None:
        print_line(
            f"{description} after step {step}, and nothing had been saved: all {plural(step, 'step')} are repeated",
            sys.stderr,
        )
        return request
    num_lost = max(0, step - parse_step(newest))
    print_line(
        f"{description} after step {step}. Resuming from {newest.name}: {plural(num_lost, 'step')} are repeated",
        sys.stderr,
    )
    return replace(request, payload={**(request.payload or {}), "resume": None})


def _environ(request: LaunchRequest) -> dict[str, str]:
    """Return the fork server's environment, with one thread for numerical libraries; workers set their own number."""
    environ = {**os.environ, **dict.fromkeys(_MATH_THREADS, "1")}
    if request.exact:
        environ[KERNELS_VARIABLE] = environ.get(KERNELS_VARIABLE) or DEFAULT_EXACT_KERNELS
    environ["PYTHONUNBUFFERED"] = "1"
    return environ


def kernel_fingerprint() -> str:
    """Return the name of the numerical kernels of this process; digests are comparable only if this name is equal."""
    return os.environ.get(KERNELS_VARIABLE) or "default"


def choose_exact_kernels() -> bool:
    """Choose exact mode's kernels before torch is imported; return False if torch was imported without a choice."""
    if not os.environ.get(KERNELS_VARIABLE) and "torch" not in sys.modules:
        os.environ[KERNELS_VARIABLE] = DEFAULT_EXACT_KERNELS
    return bool(os.environ.get(KERNELS_VARIABLE))


def torch_imported_error(cause: str, *, hint: str = "") -> UsageError:
    """Return the error for exact mode that is requested after torch has chosen its kernels."""
    return UsageError(
        f"exact mode needs kernels that {KERNELS_VARIABLE} selects before torch is imported, but "
        "torch is already imported.",
        cause=cause,
        hint=hint or f"export {KERNELS_VARIABLE}={DEFAULT_EXACT_KERNELS}, then the same command",
    )


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


def joined_failure_as_json(failure: Failure, *, resume_command: str = "") -> dict[str, Any]:
    """Return the failure of a rank that another launcher started, which has no log, under the keys of `--json`."""
    fields = _failure_fields(failure)
    if failure.exit_code == ExitCode.FAILED and is_lost_connection(failure):
        message = (
            f"rank {failure.rank} could not continue because another rank failed or did not respond: {failure.message}"
        )
        fields |= {"error": PeerError.__name__, "what": message, "where": ""}
    return {**fields, "log": "", "go_on": resume_command}


def _failure_fields(failure: Failure) -> dict[str, Any]:
    fields = {"error": failure.kind, "what": failure.message, "where": failure.where, "cause": "", "hint": ""}
    fields |= {name: value for name, value in failure.said.items() if value and not (name == "where" and failure.where)}
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
        return "\n".join([f"FAILED: {failure.screen}", f"Logs of the ranks: {log}", *resume_lines])
    step_text = f" at step {failure.step}" if failure.step else ""
    location = f"{failure.where}, " if failure.where else ""
    description = f"killed by {failure.message}" if failure.kind == "signal" else f"{failure.kind}: {failure.message}"
    lines = [f"FAILED{step_text}. First error: rank {failure.rank}, {location}{description}"]
    if failure.kind in (TIMEOUT, DIVERGED):
        lines = [f"FAILED{step_text}: {failure.message}"]
    elif failure.source:
        lines.append(f"    {failure.source}")
    lines += [f"  {line}" for line in failure.screen.splitlines()[1:]]
    num_others, reason = outcome.ranks - 1, "did not respond" if failure.kind == TIMEOUT else "failed"
    if num_others and failure.kind != DIVERGED:
        lines.append(
            f"The other {num_others} rank{'s' if num_others > 1 else ''} stopped because rank {failure.rank} {reason}."
        )
    lines += [*extra_lines, f"Full text: {log}"]
    return "\n".join([*lines, *resume_lines])


def _do_nothing() -> None:
    return None
