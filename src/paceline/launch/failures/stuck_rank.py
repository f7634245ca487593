"""Hang detection: finds the rank that the others wait for, by its last heartbeat and its process state."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from typing_extensions import override

from paceline.console.formatting import plural
from paceline.errors import MachineError, RunError
from paceline.launch.agent.rank_activity import read_rank_activity
from paceline.launch.agent.shared_status import read_heartbeat
from paceline.launch.failures.failure_record import CONNECTION, DIVERGED, TIMEOUT, Failure
from paceline.launch.failures.stack_dumps import Stack, forked_children, process_state, request_stack

_MAX_STACK_REQUESTS = 16
_STATE_DESCRIPTIONS = {
    "T": "is stopped (state T)",
    "t": "is stopped by a debugger (state t)",
    "D": "waits for a disk or a device (state D)",
    "R": "is computing (state R)",
    "S": "is waiting for something (state S)",
    "Z": "has ended (state Z)",
}


@dataclass(frozen=True, kw_only=True)
class SilentRank:
    """A rank that is alive and sends no heartbeats.

    `step` is the last step that it finished, `seconds` the time since its last heartbeat, and `state` the kernel's
    letter for the state of its process.
    """

    rank: int
    pid: int
    step: int
    seconds: float
    state: str
    location: str = ""
    stack: Stack = field(default_factory=Stack)

    @property
    def is_stopped(self) -> bool:
        """Return whether the process is stopped and cannot run until it is continued."""
        return self.state in ("T", "t")

    @override
    def __str__(self) -> str:
        last_step = f"since step {self.step}, {self.seconds:.0f} s ago" if self.step else "yet, not even one step"
        state = (
            f"; its process {self.pid} {_STATE_DESCRIPTIONS[self.state]}" if self.state in _STATE_DESCRIPTIONS else ""
        )
        return f"nothing from it {last_step}{state}{self.location}"


def find_silent_ranks(folder: Path, pids: Mapping[int, int], *, status_fd: int | None = None) -> list[SilentRank]:
    """Return the stopped ranks, or else the ranks that have finished the fewest steps.

    `status_fd` is the descriptor of the buffer into which ranks write their stacks. With it, up to 16 of these ranks
    are asked for their stacks; a stopped rank could not answer and is not asked. Ranks whose stack shows that they only
    wait for others are excluded, unless no rank would remain.
    """
    candidates = [_observe_rank(folder, rank, pid) for rank, pid in sorted(pids.items())]
    stopped = [silent_rank for silent_rank in candidates if silent_rank.is_stopped]
    oldest = min((silent_rank.step for silent_rank in candidates), default=0)
    behind = stopped or [silent_rank for silent_rank in candidates if silent_rank.step == oldest]
    if status_fd is None:
        return behind
    located = [
        locate_silent_rank(silent_rank, status_fd) if number < _MAX_STACK_REQUESTS else silent_rank
        for number, silent_rank in enumerate(behind)
    ]
    return [silent_rank for silent_rank in located if not silent_rank.stack.is_waiting_for_ranks] or located


def locate_silent_rank(silent_rank: SilentRank, status_fd: int) -> SilentRank:
    """Return the rank with its stack and location: a line of the job's code, or the data worker that it waits for."""
    if silent_rank.is_stopped:
        return silent_rank
    stack = request_stack(silent_rank.pid, status_fd)
    location = f", in {stack.user_frames[0]}" if stack.user_frames else ""
    if stack.is_waiting_for_data or not stack.user_frames:
        location = describe_data_worker(silent_rank.pid, status_fd) or location
    return replace(silent_rank, location=location, stack=stack)


def describe_data_worker(pid: int, status_fd: int) -> str:
    """Return a description of the data worker that the rank waits for: one that is stopped, or is in the job's code."""
    for worker in forked_children(pid)[:_MAX_STACK_REQUESTS]:
        state = process_state(worker)
        stack = Stack() if state in ("T", "t") else request_stack(worker, status_fd)
        if state in ("T", "t") or stack.user_frames:
            location = f", in {stack.user_frames[0]}" if stack.user_frames else ""
            return (
                f"; it waits for its data worker {worker}, which "
                f"{_STATE_DESCRIPTIONS.get(state, 'does not answer')}{location}"
            )
    return ""


def is_timeout(failure: Failure) -> bool:
    """Return whether this rank timed out while it waited for another rank."""
    text = failure.message.lower()
    return failure.is_lost_connection and ("timed out" in text or "timeout" in text)


def hang_failure(failures: Sequence[Failure], silent_ranks: Sequence[SilentRank]) -> Failure:
    """Return a timeout failure of the rank that the others waited for.

    `told_by` is the rank that waited until its limit. Its log has the backend's full message. The messages of the other
    ranks, which only lost their connection, name no limit.
    """
    waiter = max(filter(is_timeout, failures), key=lambda waiter: _timeout_limit(waiter.message))
    first = silent_ranks[0]
    ranks = " and ".join(f"rank {silent_rank.rank}" for silent_rank in silent_ranks)
    limit = _timeout_limit(waiter.message)
    message = f"no answer from {ranks}{f' within {limit:g} s' if limit else ''}: {first}"
    is_in_step = waiter.kind != MachineError.__name__  # a MachineError means that the ranks never connected
    longer_timeout = f"--train.timeout_seconds {2 * limit:.0f}" if limit else "a larger --train.timeout_seconds"
    error = RunError(message, cause=_cause(first), hint=_hint(first, longer_timeout))
    error_fields = {**error.as_json(), "error": TIMEOUT}
    return replace(
        waiter, rank=first.rank, kind=TIMEOUT, message=message, screen=str(error), step=first.step + is_in_step,
        told_by=waiter.rank, said=error_fields,
    )  # fmt: skip


def all_silent_failure(silent_ranks: Sequence[SilentRank], *, seconds: float) -> Failure:
    """Return the failure of a run in which every rank hangs and no rank waits for another."""
    first = silent_ranks[0]
    descriptions = "; ".join(f"rank {silent_rank.rank}: {silent_rank}" for silent_rank in silent_ranks[:4])
    error = RunError(
        f"no rank has responded for {seconds:.0f} s. {descriptions}.",
        cause="code that never ends, a lock that is never released, or missing data, on every rank",
        hint=f"--train.timeout_seconds {2 * seconds:.0f} if they are just slow",
    )
    error_fields = {**error.as_json(), "error": TIMEOUT}
    return Failure(
        rank=first.rank, kind=TIMEOUT, message=error.what, screen=str(error), step=first.step + 1,
        monotonic_ns=time.monotonic_ns(), said=error_fields,
        where=str(next(iter(first.stack.user_frames), "")).partition(" ")[0],
    )  # fmt: skip


def mutual_wait_failure(failures: Sequence[Failure], *, folder: Path) -> Failure:
    """Return the failure of a run in which all ranks waited for each other until one timed out.

    If torch's flight recorder has the same unfinished exchange for all of them, in their pages in the attempt `folder`,
    the connection is to blame.
    """
    activities = [read_rank_activity(folder, failure.rank) for failure in failures]
    exchanges = {activity.unfinished if activity is not None else () for activity in activities}
    if len(exchanges) > 1 or exchanges == {()}:
        return _divergence_failure(failures)
    exchange = exchanges.pop()[0]
    waiter = max(filter(is_timeout, failures), key=lambda waiter: _timeout_limit(waiter.message))
    limit = _timeout_limit(waiter.message)
    error = RunError(
        f"all ranks waited for each other in the same {exchange}{f', for {limit:g} s' if limit else ''}.",
        cause="a connection that drops or delays data, a firewall, or a GPU operation that never ends",
        hint="check the connection between these ranks, and their GPUs",
    )
    error_fields = {**error.as_json(), "error": CONNECTION}
    return replace(waiter, kind=CONNECTION, message=error.what, screen=str(error), said=error_fields)


def _divergence_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure of a run in which all ranks waited for each other in different places until one timed out."""
    waiter = max(filter(is_timeout, failures), key=lambda waiter: _timeout_limit(waiter.message))
    limit = _timeout_limit(waiter.message)
    positions = [f"rank {failure.rank} {failure.doing}" for failure in failures if failure.doing]
    summary = f"the ranks waited for each other in different places{f', for {limit:g} s' if limit else ''}"
    error = RunError(
        f"{summary}: {'; '.join(positions[:4])}." if positions else f"{summary}.",
        cause="a block that only some ranks run (layer drop, a branch on the samples), or different code on one rank",
        hint="--layout zero2 or ddp, where each rank may run different blocks"
        if positions
        else "run the same code on every rank",
    )
    error_fields = {**error.as_json(), "error": DIVERGED}
    return replace(waiter, kind=DIVERGED, message=error.what, screen=str(error), said=error_fields)


def stop_waiting_message(silent_ranks: Sequence[SilentRank], *, seconds: float) -> str:
    """Return the message for a user who asked the run to stop and sees nothing happen."""
    if not silent_ranks:
        return f"no rank has started after {seconds:.0f} s; Ctrl-C again stops at once"
    instruction = "Ctrl-C again stops at once and loses the steps since the last save"
    stopped = [silent_rank for silent_rank in silent_ranks if silent_rank.is_stopped]
    if stopped:
        instruction = (
            f"kill -CONT {' '.join(str(silent_rank.pid) for silent_rank in stopped)} lets it finish; {instruction}"
        )
    lines = _rank_lines(silent_ranks)
    return f"still waiting for {plural(len(silent_ranks), 'rank')} after {seconds:.0f} s:\n{lines}\n{instruction}"


def silence_notice(silent_ranks: Sequence[SilentRank], *, seconds: float) -> str:
    """Return the message about ranks that have sent no heartbeat for `seconds`, while the run continues."""
    stopped = [str(silent_rank.pid) for silent_rank in silent_ranks if silent_rank.is_stopped]
    wake_hint = f"kill -CONT {' '.join(stopped)} lets them continue; " if stopped else ""
    return (
        f"nothing from {plural(len(silent_ranks), 'rank')} for {seconds:.0f} s:\n{_rank_lines(silent_ranks)}\n"
        f"{wake_hint}Ctrl-C asks to stop"
    )


def _rank_lines(silent_ranks: Sequence[SilentRank]) -> str:
    return "\n".join(f"  rank {silent_rank.rank}: {silent_rank}" for silent_rank in silent_ranks[:4])


def _observe_rank(folder: Path, rank: int, pid: int) -> SilentRank:
    beat = read_heartbeat(folder / f"pulse-{rank}")
    has_heartbeat = beat is not None and beat.monotonic_ns
    seconds = (time.monotonic_ns() - beat.monotonic_ns) / 1e9 if beat is not None and has_heartbeat else 0.0
    step = beat.step if beat is not None and has_heartbeat else 0
    return SilentRank(rank=rank, pid=pid, step=step, seconds=seconds, state=process_state(pid))


def _timeout_limit(text: str) -> float:
    """Return the timeout in seconds from the backend's message; 0 if it contains none."""
    for pattern, unit in ((r"(\d+) ?ms\b", 1000), (r"(\d+) ?milliseconds", 1000), (r"after (\d+) seconds", 1)):
        match = re.search(pattern, text)
        if match:
            return int(match[1]) / unit
    return 0.0


def _cause(silent_rank: SilentRank) -> str:
    if silent_rank.is_stopped:
        return "Ctrl-Z, kill -STOP, a debugger, or a scheduler that pauses"
    if silent_rank.state == "D":
        return "a disk, a network folder or a device that does not respond"
    return "code that only this rank runs, data that takes long to read, or a lock that is never released"


def _hint(silent_rank: SilentRank, longer_timeout: str) -> str:
    if silent_rank.is_stopped:
        return f"let it run (kill -CONT PID wakes a stopped process), or {longer_timeout} to wait longer"
    return f"{longer_timeout} if it is just slow"
