"""Fault injection, for tests and `--faults`: a fault has a kind, a rank, a step and a point within the step."""

import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from paceline.console.formatting import plural
from paceline.errors import PacelineError, RunError, UsageError

PROCESS_KINDS = ("kill", "kill_node", "raise", "exit", "hang", "stop", "slow")
"""Kinds that happen to the process of the rank, at any point."""
DISK_FULL = "disk_full"
"""The kind that makes each write of a rank fail during a save."""
TRAINING_KINDS = ("nan", "spike", "corrupt")
"""Kinds that change the numbers of a step; `fault_injection.py` injects them."""
KINDS = (*PROCESS_KINDS, DISK_FULL, *TRAINING_KINDS)
POINTS = ("step", "save", "eval")
_HANG_SECONDS = 3600.0
_SLOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject at a point (see `POINTS`) of a step; `step` and `attempt` count from 1.

    `seconds` is how long a rank sleeps under `slow`.
    """

    kind: str
    rank: int
    step: int
    point: str = "step"
    attempt: int = 1
    seconds: float = _SLOW_SECONDS

    @property
    def moment(self) -> tuple[int, str, int]:
        """The attempt, the point and the step of the fault."""
        return self.attempt, self.point, self.step

    @override
    def __str__(self) -> str:
        attempt = f" attempt={self.attempt}" if self.attempt > 1 else ""
        point = f" point={self.point}" if self.point != _default_point(self.kind) else ""
        return f"{self.kind} rank={self.rank} step={self.step}{point}{attempt}"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse `"kill rank=2 step=50; nan rank=1 step=70; slow rank=0 step=9 seconds=0.5 point=save"`.

    Raises:
        UsageError: a fault is not valid, its step or attempt is 0, or two faults would happen at once.
    """
    faults = tuple(_parse(part.split()) for part in text.split(";") if part.strip())
    moments = [(fault.rank, fault.step, fault.point, fault.attempt) for fault in faults]
    for fault, moment in zip(faults, moments, strict=True):
        if moments.count(moment) > 1:
            raise UsageError(
                f"two faults happen at the same moment: {fault}, and another one.",
                hint="another step, point or attempt for one of them",
            )
    return faults


def _default_point(kind: str) -> str:
    return "save" if kind == DISK_FULL else "step"


def _parse(parts: Sequence[str]) -> Fault:
    text = " ".join(parts)
    kind, *options = parts
    pairs = dict(word.partition("=")[::2] for word in options)
    has_duplicates = len(pairs) < len(options)
    numbers = {name: pairs.pop(name, "") for name in ("rank", "step", "attempt")}
    point = pairs.pop("point", _default_point(kind))
    seconds = _parse_seconds(pairs.pop("seconds", str(_SLOW_SECONDS))) if kind == "slow" else _SLOW_SECONDS
    numbers["attempt"] = numbers["attempt"] or "1"
    are_numbers = all(number.isdecimal() and number.isascii() for number in numbers.values()) and seconds is not None
    points = POINTS if kind in PROCESS_KINDS else (_default_point(kind),)
    if kind not in KINDS or point not in points or pairs or has_duplicates or not are_numbers or seconds is None:
        raise UsageError(
            f"the fault {text!r} is not understood.",
            cause=f"kinds: {', '.join(KINDS)}; points: {', '.join(POINTS)}, but {', '.join(TRAINING_KINDS)} happen "
            f"only in a step, and {DISK_FULL} only in a save",
            hint='--faults "kill rank=1 step=50"',
        )
    rank, step, attempt = (int(numbers[name]) for name in ("rank", "step", "attempt"))
    if not step or not attempt:
        raise UsageError(f"the fault {text!r} never happens: steps and attempts count from 1.", hint="step=1")
    return Fault(kind=kind, rank=rank, step=step, point=point, attempt=attempt, seconds=seconds)


def _parse_seconds(text: str) -> float | None:
    """Return the number of seconds, or None if the text is not a number from 0 to an hour."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= _HANG_SECONDS else None


def refuse_idle_faults(
    faults: Sequence[Fault], *, ranks: int, steps: int | None, servers: int = 0
) -> list[PacelineError]:
    """Return errors for faults whose rank or step does not exist. `steps` is None if the number is not known yet.

    `servers` is the number of parameter servers. The other ranks are then workers, whose numbers no fault changes.
    Without this check, a test with such a fault would pass without testing anything.
    """
    problems: list[PacelineError] = []
    for fault in faults:
        if fault.rank >= ranks:
            last = "rank 0 is the only rank" if ranks == 1 else f"ranks are 0 to {ranks - 1}"
            problems.append(
                UsageError(f"the fault on rank {fault.rank} never happens: {last}.", hint=f"rank={ranks - 1}")
            )
        if servers and fault.rank >= servers and fault.kind in TRAINING_KINDS:
            problems.append(
                UsageError(
                    f"the fault {str(fault)!r} can't be injected into a worker of parameter servers.",
                    hint=f"--faults with {', '.join(PROCESS_KINDS)}",
                )
            )
        if steps is not None and fault.step > steps:
            problems.append(
                UsageError(
                    f"the fault in step {fault.step} never happens: the run has {plural(steps, 'step')}.",
                    hint=f"step={steps}",
                )
            )
    return problems


class Faults:
    """The faults of one rank in one attempt.

    A fault that happens leaves an empty file in its attempt's folder, `attempt_folder`, so that a later attempt knows
    of it. `command_pid` is the process that started the ranks, which `kill_node` kills too; 0 if it is not known.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        *,
        rank: int,
        attempt: int,
        attempt_folder: Path | None = None,
        command_pid: int = 0,
    ) -> None:
        self._all = faults
        self._attempt_folder = attempt_folder
        self._command_pid = command_pid
        self._earlier = [fault for fault in faults if fault.rank == rank and fault.attempt < attempt]
        self._by_point_and_step = {(f.point, f.step): f for f in faults if f.rank == rank and f.attempt == attempt}
        self._due_on_any_rank = {(f.point, f.step) for f in faults if f.attempt == attempt}
        self._later = [fault for fault in faults if fault.rank == rank and fault.attempt > attempt]
        self._injected: set[Fault] = set()

    @property
    def has_any(self) -> bool:
        """True if a rank has a fault in this attempt. It is equal on all ranks."""
        return bool(self._due_on_any_rank)

    def is_due_on_any_rank(self, point: str, *, step: int) -> bool:
        """Return whether a rank has a fault at this point of this step. It is equal on all ranks."""
        return (point, step) in self._due_on_any_rank

    def fire(self, point: str, *, step: int) -> Fault | None:
        """Inject the fault that is due at this point of this step, and return it; None if there is none.

        A fault of `TRAINING_KINDS` is only returned. The caller injects it, and then calls `mark_injected`.
        """
        fault = self._by_point_and_step.get((point, step)) if self._by_point_and_step else None
        if fault is None:
            return None
        if fault.kind in PROCESS_KINDS:
            self.mark_injected(fault)
            if fault.kind == "kill_node" and self._command_pid:
                with suppress(ProcessLookupError):
                    os.kill(self._command_pid, signal.SIGKILL)  # which ends the other ranks
            _inject_into_process(fault)
        return fault

    @contextmanager
    def full_disk(self, *, step: int) -> Iterator[None]:
        """Return a context in which each write of this process fails, if a full disk is due in the save of `step`."""
        fault = self._by_point_and_step.get(("save", step))
        if fault is None or fault.kind != DISK_FULL:
            yield
            return
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            yield
        except (OSError, PacelineError):
            self.mark_injected(fault)  # a rank that writes nothing notices nothing
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def mark_injected(self, fault: Fault) -> None:
        """Record that this fault has happened."""
        self._injected.add(fault)
        if self._attempt_folder is not None:
            with suppress(OSError):
                self._mark(self._attempt_folder, fault).touch()

    @property
    def missed(self) -> list[str]:
        """The faults of this rank that have not happened, in this attempt, an earlier one or a later one, as text."""
        current = [fault for fault in self._by_point_and_step.values() if fault not in self._injected]
        return [str(fault) for fault in (*filter(self._was_missed, self._earlier), *current, *self._later)]

    def _was_missed(self, fault: Fault) -> bool:
        """Return whether a fault of an earlier attempt did not happen. If its folder is gone, nobody knows."""
        if self._attempt_folder is None:
            return False
        folder = self._attempt_folder.parent / f"attempt-{fault.attempt}"
        moment = [other for other in self._all if other.moment == fault.moment]  # the first of them ends the attempt
        return folder.is_dir() and not any(self._mark(folder, other).exists() for other in moment)

    @staticmethod
    def _mark(folder: Path, fault: Fault) -> Path:
        return folder / f"fault-{fault.kind}-{fault.point}-rank-{fault.rank}-step-{fault.step}"


def _inject_into_process(fault: Fault) -> None:
    if fault.kind in ("kill", "kill_node"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind == "exit":
        os._exit(7)
    elif fault.kind == "hang":
        time.sleep(_HANG_SECONDS)
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "raise":
        raise RuntimeError(f"injected fault: raise at {fault.point} of step {fault.step}")


class MissedFaultError(RunError):
    """A fault did not happen during the run, so that what the run was to show is not shown."""


def missed_faults_error(missed: Sequence[str]) -> MissedFaultError:
    """Return the error at the end of a run in which faults did not happen."""
    return MissedFaultError(
        f"{plural(len(missed), 'fault')} of --faults did not happen: {'; '.join(missed)}.",
        cause="no save or evaluation at that step, a rank that computes no loss or saves nothing, or an attempt that "
        "was not needed",
        hint="the training itself is complete and saved; give the fault another step, rank, point or attempt",
    )
