"""The launcher: runs the attempts of a run one after the other, and returns how the last one ended."""

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import LATEST, newest_step, resolve_mark
from paceline.config.settings import Survive
from paceline.config.task import PreviousFailure
from paceline.console.output import print_line
from paceline.errors import ExitCode, MachineError, UsageError
from paceline.filesystem.atomic_files import write_json
from paceline.filesystem.run_lock import RunLock, lock_run_folder
from paceline.launch.agent.forkserver_client import MEMORY_FOLDER, ForkserverClient
from paceline.launch.agent.restart_policy import (
    DEFAULT_RESTARTS,
    Action,
    AttemptEnded,
    EndRun,
    Event,
    NodesChange,
    PrintLine,
    RestartPolicy,
    RunRequested,
    SaveCompleted,
    StartAttempt,
    StopAttempt,
    StopRequested,
    TimePassed,
)
from paceline.launch.agent.stop_requests import StopRequests
from paceline.launch.agent.supervisor import Supervisor
from paceline.launch.failures.failure_record import FIRST_FAILURE, Failure
from paceline.launch.failures.missing_heartbeats import DEFAULT_SECONDS
from paceline.launch.folder_watch import FolderWatch
from paceline.launch.launch_environment import launch_environ
from paceline.launch.memory_disk import choose_memory_folder, remove_abandoned_memory_folders
from paceline.launch.rendezvous import listen_on_free_port
from paceline.launch.run_outcome import STOPPED_AT_ONCE, LaunchOutcome
from paceline.launch.several_nodes.attempt_part import AttemptPart
from paceline.launch.several_nodes.attempt_progress import PartResult, read_progress
from paceline.launch.several_nodes.node_group import NodeGroup
from paceline.run_folder.run_folder import RunFolder

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The description of what to start: an entry (`"pkg.module:function"`) with a payload, or the user's own script.

    With `saves_checkpoints`, the run folder is locked, a failed attempt is followed by another one, and the first stop
    signal asks the ranks to finish their step and save. Without `saves_checkpoints`, only SIGUSR1 asks the ranks to
    stop, and any other stop signal kills them. If `servers` is positive, the first `servers` ranks are parameter
    servers, and any other rank that is killed is restarted alone.

    If a rank is lost, the run may continue with one of `fewer_ranks`, the largest first.
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
    fewer_ranks: tuple[int, ...] = ()
    nodes: NodeGroup | None = None
    """The other nodes, which have the ranks after those of this node; None if all ranks are on this machine."""
    working_folder: str = ""
    """The working folder of the ranks; if empty, the one of this process."""


def start(request: LaunchRequest, *, on_start: Callable[[Path], Callable[[], None]] | None = None) -> LaunchOutcome:
    """Run attempts until the run is done, is stopped, or fails in a way that no restart can repair.

    `on_start(attempt_folder)` returns a function that is called every 50 ms while the attempt runs.

    Raises:
        UsageError: the request saves checkpoints, and another run has locked the run folder.
        MachineError: the ranks could not reach each other on this machine.
    """
    if request.ranks > 1:
        listen_on_free_port().close()  # fail early: the fork server would find out only after it imported torch
    run_lock = lock_run_folder(request.run.path, on_wait=print_line) if request.saves_checkpoints else None
    if run_lock is not None:
        remove_abandoned_memory_folders(request.run.path)
    own_folder = choose_memory_folder() if request.saves_checkpoints and request.nodes is None else ""
    memory_folder = own_folder if request.nodes is None else request.nodes.memory.own.folder
    request = replace(request, payload={**(request.payload or {}), "memory_folder": own_folder})
    forkserver = ForkserverClient(
        environ={**launch_environ(os.environ, exact=request.exact), MEMORY_FOLDER: memory_folder},
        working_folder=request.working_folder,
        inherited_handles=_inherited_handles(run_lock, request.payload or {}),
    )
    stop_requests = StopRequests()
    folder_watch = FolderWatch(request.run.path) if run_lock is not None else None
    try:
        with stop_requests.listening():
            try:
                return _run_attempts(
                    request,
                    forkserver=forkserver,
                    stop_requests=stop_requests,
                    folder_watch=folder_watch,
                    on_start=on_start,
                )
            finally:
                forkserver.close()
    finally:
        if memory_folder:
            shutil.rmtree(memory_folder, ignore_errors=True)
        if run_lock is not None:
            run_lock.close()


def _run_attempts(
    request: LaunchRequest,
    *,
    forkserver: ForkserverClient,
    stop_requests: StopRequests,
    folder_watch: FolderWatch | None,
    on_start: Callable[[Path], Callable[[], None]] | None,
) -> LaunchOutcome:
    """Carry out the actions of the restart policy, and return the outcome of the last attempt."""
    start_time = time.monotonic()
    policy = RestartPolicy()
    actions = deque[Action](policy.handle(_run_requested(request)))
    outcome: LaunchOutcome | None = None
    end: AttemptEnded | None = None
    num_restarts = 0
    while True:
        if not actions:  # the next attempt is due later
            time.sleep(_POLL_SECONDS)
            event = StopRequested() if stop_requests.count else TimePassed(time=time.monotonic())
            actions += policy.handle(event)
            continue
        action = actions.popleft()
        if isinstance(action, PrintLine):
            print_line(action.text, sys.stderr)
        elif isinstance(action, StartAttempt):
            if outcome is not None and folder_watch is not None and folder_watch.is_lost():
                actions.append(EndRun(reason="Not restarted: the run folder was moved or removed."))
                continue
            if end is not None and end.failure is not None:
                request, num_restarts = _restart_request(request, end, end.failure), num_restarts + 1
            elif end is not None:
                request = _resized_request(request, end)
            request = _with_ranks(request, action.ranks)
            try:
                request = _with_nodes(request, stop_requests)
                outcome = _run_attempt(
                    request,
                    on_start,
                    forkserver=forkserver,
                    stop_requests=stop_requests,
                    policy=policy,
                    folder_watch=folder_watch,
                )
            except (UsageError, MachineError) as error:  # a folder can't be written, or there are too few nodes
                outcome, action = _end_before_attempt(outcome, error, stop_requests)
                actions.append(action)
                continue
            end = _attempt_ended(request, outcome)
            if stop_requests.count:
                actions += policy.handle(StopRequested())
            actions += policy.handle(end)
        elif isinstance(action, EndRun):
            assert outcome is not None
            if action.reason and outcome.failure is None:  # else the final screen says it
                print_line(action.reason, sys.stderr)
            _record_end(outcome, reason=action.reason)
            seconds = time.monotonic() - start_time
            return replace(outcome, restarts=num_restarts, end_reason=action.reason, seconds=seconds)


def _end_before_attempt(
    outcome: LaunchOutcome | None, error: UsageError | MachineError, stop_requests: StopRequests
) -> tuple[LaunchOutcome, EndRun]:
    """Return the end of a run whose next attempt can't start, with the outcome of the last one.

    Raises:
        UsageError, MachineError, KeyboardInterrupt: there is no last one.
    """
    if outcome is None:
        raise KeyboardInterrupt if stop_requests.is_interrupted else error
    if not stop_requests.is_interrupted:
        return outcome, EndRun(reason=f"Not restarted: {error.what}")
    stopped = replace(outcome, failure=None, exit_code=int(ExitCode.INTERRUPTED))
    return stopped, EndRun(reason="stopped while waiting for another node")


def _with_nodes(request: LaunchRequest, stop_requests: StopRequests) -> LaunchRequest:
    """Wait for the nodes of the next attempt, and return the request with the number of their ranks.

    Raises:
        MachineError: there are too few nodes.
    """
    if request.nodes is None:
        return request
    if problem := request.nodes.gather(is_stopped=stop_requests.is_asked):
        raise MachineError(problem)
    return _with_ranks(request, request.nodes.num_ranks)


def _record_end(outcome: LaunchOutcome, *, reason: str) -> None:
    """Write to the folder of the last attempt why the run ended."""
    if outcome.failure is not None and reason:
        _write_failure(outcome.attempt_folder, replace(outcome.failure, end_reason=reason))
    if outcome.exit_code == ExitCode.INTERRUPTED:
        with suppress(OSError):
            (outcome.attempt_folder / STOPPED_AT_ONCE).touch()


def _run_requested(request: LaunchRequest) -> RunRequested:
    """Return the event that starts a run; the job may set another limit, which the ranks' heartbeats contain."""
    try:
        max_restarts = int(_setting(request, "survive.restarts", DEFAULT_RESTARTS))
        replace_seconds = float(_setting(request, "survive.replace_within", Survive().replace_within))
    except (TypeError, ValueError):  # the ranks refuse the value
        max_restarts, replace_seconds = 0, 0.0
    return RunRequested(
        can_restart=request.saves_checkpoints,
        max_restarts=max_restarts,
        rank_counts=(request.ranks, *request.fewer_ranks) if request.fewer_ranks else (),
        replace_seconds=replace_seconds,
        max_node_restarts=None if request.nodes is None else request.nodes.max_restarts,
    )


def _attempt_ended(request: LaunchRequest, outcome: LaunchOutcome) -> AttemptEnded:
    """Return the event of an attempt's end. A rank that has restored its state says from which step it started."""
    progress = outcome.progress
    has_started, saved_step = progress.start_step >= 0, _newest_step(request)
    start_step = progress.start_step if has_started else saved_step
    is_refused, nodes = outcome.exit_code == ExitCode.REFUSED, request.nodes
    is_wrong_size = nodes is not None and is_refused and nodes.counts.leave_out(nodes.num_nodes)
    if nodes is not None and not is_refused:
        nodes.counts.accept(nodes.num_nodes)
    return AttemptEnded(
        exit_code=outcome.exit_code,
        failure=outcome.failure,
        has_started=has_started,
        start_step=start_step,
        reached_step=max(start_step, progress.step),
        saved_step=saved_step,
        time=time.monotonic(),
        max_restarts=progress.max_restarts if progress.max_restarts >= 0 else None,
        is_wrong_size=is_wrong_size,
    )


def _newest_step(request: LaunchRequest) -> int:
    """Return the step of the newest checkpoint, on disk or in memory; 0 if there is none."""
    memory_folder = (request.payload or {}).get("memory_folder")
    folders = [request.run.checkpoints, *([Path(memory_folder)] if memory_folder else [])]
    on_nodes = 0 if request.nodes is None else request.nodes.memory.newest_step()
    return max([0, on_nodes, *map(newest_step, folders)])


def _run_attempt(
    request: LaunchRequest,
    on_start: Callable[[Path], Callable[[], None]] | None,
    *,
    forkserver: ForkserverClient,
    stop_requests: StopRequests,
    policy: RestartPolicy,
    folder_watch: FolderWatch | None,
) -> LaunchOutcome:
    """Start the ranks of one attempt, wait until they end, and store the first failure in the attempt folder."""
    start_time = time.monotonic()
    attempt, nodes = request.run.next_attempt(), request.nodes
    part, path = _start_part(request, attempt)
    folder = request.run.attempt_folder(attempt)
    tick = on_start(folder) if on_start else _do_nothing
    supervisor = Supervisor(
        forkserver=forkserver,
        request=path,
        ranks=part.ranks,
        stop_requests=stop_requests,
        saves_checkpoints=request.saves_checkpoints,
        silence_timeout=_silence_timeout(request),
        watches_hangs=not request.servers,
        sees_all_ranks=nodes is None,
        remote_positions=tuple if nodes is None else nodes.silent_positions,
    )
    decide = partial(_decide, policy, supervisor)
    has_new_step = partial(_has_new_step, folder, part.ranks)
    watch = _SaveWatch(request, decide=decide)

    def tick_and_watch() -> None:
        tick()
        warning = "" if folder_watch is None else folder_watch.warning()
        if warning:
            print_line(warning, sys.stderr)
        if policy.waits_for_save:
            watch.check()
        if nodes is not None:
            if nodes.has_failed():
                supervisor.end_attempt()
            elif not stop_requests.count and (reason := nodes.pending_change(can_grow=has_new_step)):
                decide(NodesChange(reason=reason))

    code, failure = supervisor.run(tick_and_watch)
    result = PartResult(exit_code=code, failure=failure, progress=read_progress(folder, part.ranks))
    if nodes is not None:
        result = nodes.finish_attempt(result, is_abandoned=lambda: stop_requests.count > 1)
        if reason := nodes.pending_change():
            decide(NodesChange(reason=reason))
    tick()
    if result.failure is not None:
        _write_failure(folder, result.failure)
    return LaunchOutcome(
        exit_code=result.exit_code,
        failure=result.failure,
        progress=result.progress,
        attempt_folder=folder,
        seconds=time.monotonic() - start_time,
        ranks=request.ranks,
    )


def _start_part(request: LaunchRequest, attempt: int) -> tuple[AttemptPart, Path]:
    """Return the part of an attempt that runs here, and the path of its request. Other nodes start their parts."""
    fork_request = {
        "entry": request.entry,
        "payload": {**(request.payload or {}), "attempt": attempt},
        "script": request.script,
        "ranks": request.ranks,
        "threads": request.threads,
        "servers": request.servers,
    }
    if request.nodes is not None:
        return request.nodes.start_attempt(request.run, attempt, fork_request, exact=request.exact)
    part = AttemptPart(ranks=range(request.ranks))
    return part, part.write_request(request.run, attempt, fork_request)


class _SaveWatch:
    """A watch for the next checkpoint on disk, for a policy that waits for it. The policy may then stop the attempt."""

    def __init__(self, request: LaunchRequest, *, decide: Callable[[Event], None]) -> None:
        self._folder = request.run.checkpoints
        self._decide = decide
        self._newest = resolve_mark(self._folder, LATEST)

    def check(self) -> None:
        """Tell the policy if there is a new checkpoint."""
        newest = resolve_mark(self._folder, LATEST)
        if newest != self._newest:
            self._newest = newest
            self._decide(SaveCompleted(time=time.monotonic()))


def _decide(policy: RestartPolicy, supervisor: Supervisor, event: Event) -> None:
    """Carry out what the policy decides about the current attempt."""
    for action in policy.handle(event):
        if isinstance(action, PrintLine):
            print_line(action.text, sys.stderr)
        elif isinstance(action, StopAttempt):
            supervisor.stop_attempt()


def _has_new_step(folder: Path, ranks: range) -> bool:
    """Return whether these ranks have completed a step of this attempt."""
    progress = read_progress(folder, ranks)
    return 0 <= progress.start_step < progress.step


def _write_failure(folder: Path, failure: Failure) -> None:
    with suppress(OSError):
        write_json(folder / FIRST_FAILURE, asdict(failure))


def _inherited_handles(run_lock: RunLock | None, payload: Mapping[str, Any]) -> list[int]:
    """Return the file handles that the ranks inherit: the run's lock, and the file of a job passed as an object."""
    handles = [None if run_lock is None else run_lock.handle, payload.get("job_handle")]
    return [handle for handle in handles if handle is not None]


def _setting(request: LaunchRequest, name: str, default: Any) -> Any:
    """Return a setting as the command got it; the job's own settings are not known here."""
    return (request.payload or {}).get("settings", {}).get(name, default)


def _silence_timeout(request: LaunchRequest) -> float:
    """Return the timeout of the request's settings in seconds, or the default; heartbeats contain the job's timeout."""
    try:
        return float(_setting(request, "train.timeout_seconds", DEFAULT_SECONDS))
    except (TypeError, ValueError):
        return DEFAULT_SECONDS


def _restart_request(request: LaunchRequest, end: AttemptEnded, failure: Failure) -> LaunchRequest:
    """Return the request for the attempt that follows a failed one.

    It continues from the newest checkpoint, on disk or in memory, if there is one and the failed attempt had restored
    the state that the user asked for. Otherwise, and if the one in memory is damaged, it starts as that attempt did. If
    that attempt completed no step, the time and the step of the fault before it count, because the run is still
    recovering from that fault.
    """
    payload = dict(request.payload or {})
    if end.has_started and newest_step(request.run.checkpoints) > 0:
        payload["resume"] = None
    if end.reached_step > end.start_step:
        options = {name: value for name, value in payload.get("options", {}).items() if name != "evaluate_first"}
        payload["options"] = options
    restart = PreviousFailure(
        reason=failure.summary,
        failed_step=failure.step,
        monotonic_ns=failure.monotonic_ns or time.monotonic_ns(),
        copies=failure.said.get("copies"),
    )
    earlier = payload.get("restart")
    if earlier is not None and end.reached_step <= end.start_step:
        first_reason, step = earlier["reason"].partition("; then ")[0], max(restart.failed_step, earlier["failed_step"])
        reason = f"{first_reason}; then {restart.reason}"
        copies = restart.copies or earlier.get("copies")
        restart = replace(restart, reason=reason, failed_step=step, monotonic_ns=earlier["monotonic_ns"], copies=copies)
    return replace(request, payload={**payload, "restart": asdict(restart)})


def _resized_request(request: LaunchRequest, end: AttemptEnded) -> LaunchRequest:
    """Return the request for the attempt that follows one that was stopped for another number of ranks."""
    payload = {**(request.payload or {}), "restart": None}
    if end.has_started and end.saved_step:
        payload["resume"] = None
    options = {name: value for name, value in payload.get("options", {}).items() if name != "evaluate_first"}
    return replace(request, payload={**payload, "options": options})


def _with_ranks(request: LaunchRequest, ranks: int) -> LaunchRequest:
    """Return the request with another number of ranks; 0 means no change."""
    if ranks in (0, request.ranks):
        return request
    return replace(request, ranks=ranks, payload={**(request.payload or {}), "ranks": ranks})


def _do_nothing() -> None:
    return None
