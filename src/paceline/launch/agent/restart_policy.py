"""The decisions about a run: when an attempt starts, when a failed one is followed by another, and how the run ends.

`RestartPolicy.handle(event)` returns the actions to carry out. It reads no clock and starts no process, so that tests
can call it with any sequence of events. `launcher.start` carries out the actions.
"""

import re
from dataclasses import dataclass

from paceline.config.settings import Survive
from paceline.console.formatting import plural
from paceline.errors import DataError, DesyncError, ExitCode, RollbackError, SaveError, SpikeError
from paceline.faults import MissedFaultError
from paceline.launch.agent.resizing import Resizing
from paceline.launch.failures.failure_record import CONNECTION, FORKSERVER_RANK, LOST_NODE, TIMEOUT, Failure

DEFAULT_RESTARTS = Survive().restarts
_FINAL_KINDS = (SpikeError.__name__, SaveError.__name__, MissedFaultError.__name__)
"""Errors that a restart can't repair."""
_CRASH_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")
_STOP_REASON = "Not restarted: a stop was requested."
_NUMBER = re.compile(r"\d+")
_DEVICE_ERROR = re.compile(
    r"this rank needs GPU \d|No CUDA GPUs are available|no CUDA-capable device|invalid device ordinal|"
    r"CUDA error: (unspecified launch failure|.*ECC|.*hardware|.*busy or unavailable)"
)
_IMMEDIATE_RESTARTS = 2
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS, _MAX_DOUBLINGS = 1.0, 30.0, 8


@dataclass(frozen=True, kw_only=True)
class RunRequested:
    """Event: the run is to start. `can_restart` is False for commands that save nothing, such as `verify`.

    `rank_counts` has the numbers of ranks that the run may have, the largest first; it is empty if there is only one.
    `max_node_restarts` is how many times the run may continue after a node is lost; None on one machine. On several
    nodes, a line is printed before each restart, also before an immediate one, because a restart may take long there.
    """

    can_restart: bool
    max_restarts: int = DEFAULT_RESTARTS
    rank_counts: tuple[int, ...] = ()
    replace_seconds: float = Survive().replace_within
    max_node_restarts: int | None = None


@dataclass(frozen=True, kw_only=True)
class AttemptEnded:
    """Event: no process of the attempt is left.

    `saved_step` is the step of the newest checkpoint now; 0 if there is none. `max_restarts` is the setting
    `survive.restarts` that the ranks read, which the job may have set; None if no rank got that far.
    """

    exit_code: int
    failure: Failure | None
    has_started: bool
    """Whether a rank restored the state from which the attempt was to start."""
    start_step: int
    """The step of the checkpoint from which the attempt started; 0 if it started at the beginning."""
    reached_step: int
    """The last step that a rank completed; `start_step` if there was none."""
    saved_step: int
    time: float
    max_restarts: int | None = None
    is_wrong_size: bool = False
    """Whether the job has refused this number of nodes, and another one is possible."""


@dataclass(frozen=True, kw_only=True)
class SaveCompleted:
    """Event: the current attempt has saved a checkpoint on disk, at `time`."""

    time: float


@dataclass(frozen=True, kw_only=True)
class NodesChange:
    """Event: the current attempt should stop, to continue on other nodes. `reason` is the line for the screen."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class StopRequested:
    """Event: a signal asks the command to stop."""


@dataclass(frozen=True, kw_only=True)
class TimePassed:
    """Event: the time is now `time`, in seconds of the monotonic clock."""

    time: float


@dataclass(frozen=True, kw_only=True)
class StartAttempt:
    """Action: start an attempt. `after` is the failure that it follows, or None.

    `ranks` is its number of ranks; 0 for the number that the command asked for.
    """

    after: Failure | None = None
    ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class StopAttempt:
    """Action: ask the ranks of the current attempt to save and stop, so that another one can follow."""


@dataclass(frozen=True, kw_only=True)
class PrintLine:
    """Action: print a line to standard error."""

    text: str


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """Action: end the run with the result of its last attempt. `reason` says why there is no further restart."""

    reason: str = ""


Event = RunRequested | AttemptEnded | SaveCompleted | NodesChange | StopRequested | TimePassed
Action = StartAttempt | StopAttempt | PrintLine | EndRun


class RestartPolicy:
    """The state of one run, between its attempts and during them."""

    def __init__(self) -> None:
        self._can_restart = False
        self._max_restarts = DEFAULT_RESTARTS
        self._num_restarts = 0  # since the last new checkpoint
        self._saved_step = 0  # of the newest checkpoint when the last attempt ended
        self._previous_end: AttemptEnded | None = None  # of the last attempt that was followed by another
        self._pending_failure: Failure | None = None  # the failure of the attempt that waits for its restart
        self._restart_time = 0.0
        self._is_stop_requested = False
        self._resizing = Resizing(())
        self._is_waiting_for_rank = False  # the last failure may be that of a rank that is not back yet
        self._num_node_restarts, self._max_node_restarts = 0, 0
        self._announces_restarts = False
        self._num_waits = 0  # restarts for such failures, which `Resizing` limits
        self._is_resizing = False  # the current attempt stops for another number of ranks

    @property
    def waits_for_save(self) -> bool:
        """Return whether the policy wants to know when the current attempt saves a checkpoint."""
        return self._resizing.is_small and not self._is_resizing

    def handle(self, event: Event) -> list[Action]:
        """Return the actions that follow from `event`, in order."""
        if isinstance(event, RunRequested):
            self._can_restart, self._max_restarts = event.can_restart, event.max_restarts
            self._max_node_restarts = event.max_node_restarts or 0
            self._announces_restarts = event.max_node_restarts is not None
            self._resizing = Resizing(event.rank_counts, replace_seconds=event.replace_seconds)
            return [self._start_attempt()]
        if isinstance(event, StopRequested):
            self._is_stop_requested = True
            return [EndRun(reason=_STOP_REASON)] if self._pending_failure is not None else []
        if isinstance(event, TimePassed):
            return self._start_pending_attempt(event.time)
        if isinstance(event, SaveCompleted):
            line = self._resizing.grow_if_due(time=event.time)
            self._is_resizing = bool(line)
            return [PrintLine(text=line), StopAttempt()] if line else []
        if isinstance(event, NodesChange):
            if self._is_resizing or self._is_stop_requested:
                return []
            self._is_resizing = True
            return [PrintLine(text=event.reason), StopAttempt()]
        return self._handle_end(event)

    def _handle_end(self, event: AttemptEnded) -> list[Action]:
        failure = event.failure
        if event.max_restarts is not None:
            self._max_restarts = event.max_restarts
        is_rollback = failure is not None and failure.kind == RollbackError.__name__
        is_resizing, self._is_resizing = self._is_resizing, False
        if is_resizing and failure is None and event.exit_code == ExitCode.STOPPED and not self._is_stop_requested:
            self._saved_step = max(self._saved_step, event.saved_step)
            return [self._start_attempt()]
        is_lost_node = failure is not None and failure.kind == LOST_NODE
        if failure is None or not self._can_restart or not (self._max_restarts or is_rollback or is_lost_node):
            return [EndRun()]
        if self._is_stop_requested:
            return [EndRun(reason=_STOP_REASON)]
        if is_lost_node:
            return self._replace_node(failure)
        if event.is_wrong_size:
            text = f"{failure.summary}; this number of nodes does not fit the job, so it is not tried again"
            return [PrintLine(text=text), self._start_attempt(after=failure)]
        if event.saved_step > self._saved_step:
            self._num_restarts = self._num_waits = 0
        self._saved_step = max(self._saved_step, event.saved_step)
        if is_rollback:  # `train.max_rollbacks` limits their number
            return [*self._announcement(f"{failure.summary}; restarting"), self._start_attempt(after=failure)]
        line = self._resize_text(event, failure)
        if line:
            self._num_restarts = self._num_waits = 0
            return [PrintLine(text=f"{failure.summary}: {line}"), self._start_attempt(after=failure)]
        reason = self._reason_to_end(event, failure)
        if reason is not None:
            return [EndRun(reason=reason)]
        if self._is_waiting_for_rank:
            self._num_waits += 1
        else:
            self._num_restarts += 1
        self._previous_end, self._pending_failure = event, failure
        delay = self._delay_seconds()
        self._restart_time = event.time + delay
        if delay:
            return [PrintLine(text=self._waiting_text(failure, delay=delay))]
        text = self._waiting_text(failure, delay=delay)
        return [*self._announcement(text), *self._start_pending_attempt(event.time)]

    def _announcement(self, text: str) -> list[Action]:
        """Return the line before a restart that is not delayed, if such a line is printed."""
        return [PrintLine(text=text)] if self._announces_restarts else []

    def _replace_node(self, failure: Failure) -> list[Action]:
        """Start an attempt for which another node takes the place of the lost one, if there may be one."""
        if self._num_node_restarts >= self._max_node_restarts:
            reason = f"Not restarted again: nodes.restarts is {self._max_node_restarts}."
            return [EndRun(reason=reason if self._max_node_restarts else "")]
        self._num_node_restarts += 1
        number = f"restart {self._num_node_restarts} of {self._max_node_restarts}"
        if failure.rank == 0:  # on node 0, where this process runs: it is cut off
            hint = failure.screen.partition("\n")[2]
            text = "\n".join([f"{failure.summary}; waiting for the others ({number})", *([hint] if hint else [])])
        else:
            others = "nodes in their place" if failure.said.get("lost_nodes") else "a node in its place"
            text = f"{failure.summary}; waiting for {others} ({number})"
        return [PrintLine(text=text), self._start_attempt(after=failure)]

    def _start_attempt(self, *, after: Failure | None = None) -> StartAttempt:
        return StartAttempt(after=after, ranks=self._resizing.ranks)

    def _resize_text(self, event: AttemptEnded, failure: Failure) -> str:
        """Return the line that says why the run continues with fewer ranks; "" if it does not."""
        self._is_waiting_for_rank = False
        if event.reached_step > event.start_step:
            self._resizing.record_progress()
            return ""
        if self._resizing.is_growing:  # the smaller number worked, so any error shows that a rank is not back
            return self._resizing.shrink("not all ranks are back", time=event.time)
        if event.exit_code == ExitCode.REFUSED and self._resizing.is_small and self._resizing.can_shrink:
            return self._resizing.shrink("this number of ranks does not fit the job", time=event.time)
        if not has_external_cause(failure) and not is_device_error(failure):
            return ""
        line = self._resizing.shrink_if_lost(failure, time=event.time)
        self._is_waiting_for_rank = self._resizing.is_waiting and not line
        return line

    def _reason_to_end(self, event: AttemptEnded, failure: Failure) -> str | None:
        """Return why the run is not restarted, as text for the screen; None if it is restarted."""
        if event.exit_code == ExitCode.REFUSED or failure.kind in _FINAL_KINDS:
            return ""
        if failure.is_short_of_memory and event.saved_step <= event.start_step:
            return ""
        is_resumed_desync = failure.kind == DesyncError.__name__ and event.start_step > 0  # earlier steps were right
        is_external = has_external_cause(failure) or self._is_waiting_for_rank
        if not is_external and event.reached_step <= event.start_step and not is_resumed_desync:
            return ""  # no step completed: the job itself has an error
        may_repeat = _is_crash(failure) or _is_killed_data_worker(failure) or failure.kind == TIMEOUT
        is_repeatable = may_repeat or not is_external
        if is_repeatable and is_same_end(event, self._previous_end):
            place = f"at step {failure.step}" if failure.step else f"after step {event.reached_step}"
            return f"Not restarted again: the same error {place} ended the attempt before."
        if self._num_restarts >= self._max_restarts and not self._is_waiting_for_rank:
            return (
                f"Not restarted again: {plural(self._num_restarts, 'restart')} without a new checkpoint "
                "(survive.restarts)."
            )
        return None

    def _delay_seconds(self) -> float:
        """Return the pause before the next attempt: none for two restarts without progress, then 1, 2, 4, ... seconds.

        The second restart is immediate because one fault may kill a process again while the run restarts.
        """
        num_attempts = self._num_restarts + self._num_waits
        if num_attempts <= _IMMEDIATE_RESTARTS:
            return 0.0
        doublings = min(num_attempts - _IMMEDIATE_RESTARTS - 1, _MAX_DOUBLINGS)
        return min(_MAX_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2.0**doublings)

    def _waiting_text(self, failure: Failure, *, delay: float) -> str:
        due = f" in {delay:.0f} s" if delay else ""
        if self._is_waiting_for_rank:
            return f"{failure.summary}; trying again{due}"
        return (
            f"{failure.summary}; restarting{due} "
            f"(restart {self._num_restarts} of {self._max_restarts} without a new checkpoint)"
        )

    def _start_pending_attempt(self, time: float) -> list[Action]:
        if self._pending_failure is None or time < self._restart_time:
            return []
        failure, self._pending_failure = self._pending_failure, None
        return [self._start_attempt(after=failure)]


def has_external_cause(failure: Failure) -> bool:
    """Return whether the cause may be outside the job, such as a signal, low memory, a slow rank or a lost node."""
    has_external_kind = failure.kind in ("signal", TIMEOUT, CONNECTION, LOST_NODE) or failure.rank == FORKSERVER_RANK
    is_external = has_external_kind or _is_killed_data_worker(failure)
    return is_external or failure.is_short_of_memory or failure.is_lost_connection


def is_device_error(failure: Failure) -> bool:
    """Return whether the error says that the rank's device is missing or broken."""
    return _DEVICE_ERROR.search(failure.message) is not None


def _is_killed_data_worker(failure: Failure) -> bool:
    return failure.kind == DataError.__name__ and "is killed by signal" in failure.message


def _is_crash(failure: Failure) -> bool:
    """Return whether native code crashed: another process could have sent the signal, but seldom does."""
    return failure.kind == "signal" and failure.message.startswith(_CRASH_SIGNALS)


def is_same_end(event: AttemptEnded, previous: AttemptEnded | None) -> bool:
    """Return whether two attempts ended with the same error at the same step.

    The rank may differ. Messages are compared without their numbers, because they may contain process ids and times.
    """
    return previous is not None and _signature(event) == _signature(previous)


def _signature(event: AttemptEnded) -> tuple[str, str, int] | None:
    failure = event.failure
    if failure is None:
        return None
    message = "" if failure.kind == TIMEOUT else _NUMBER.sub("", failure.message)
    return failure.kind, message, failure.step or event.reached_step
