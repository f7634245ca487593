"""Fault injection, for tests and `--faults`: a fault has a kind, a rank, a step and a point within the step."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.console.formatting import plural
from paceline.errors import PacelineError, UsageError

KINDS = ("kill", "raise", "nan", "exit", "hang", "stop")
POINTS = ("step", "save", "eval")
_HANG_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to inject at a point (see `POINTS`) of a step; `step` and `attempt` count from 1."""

    kind: str
    rank: int
    step: int
    point: str = "step"
    attempt: int = 1


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse `"kill rank=2 step=50; nan rank=1 step=70 point=save"`.

    Raises:
        UsageError: a fault is not valid, or its step or attempt is 0.
    """
    return tuple(_parse(part.split()) for part in text.split(";") if part.strip())


def _parse(parts: Sequence[str]) -> Fault:
    text = " ".join(parts)
    kind, *options = parts
    pairs = dict(word.partition("=")[::2] for word in options)
    has_duplicates = len(pairs) < len(options)
    numbers = {name: pairs.pop(name, "") for name in ("rank", "step", "attempt")}
    point = pairs.pop("point", "step")
    numbers["attempt"] = numbers["attempt"] or "1"
    are_numbers = all(number.isdecimal() and number.isascii() for number in numbers.values())
    if kind not in KINDS or point not in POINTS or pairs or has_duplicates or not are_numbers:
        raise UsageError(
            f"the fault {text!r} is not understood.",
            cause=f"kinds: {', '.join(KINDS)}; points: {', '.join(POINTS)}",
            hint='--faults "kill rank=1 step=50"',
        )
    rank, step, attempt = (int(numbers[name]) for name in ("rank", "step", "attempt"))
    if not step or not attempt:
        raise UsageError(f"the fault {text!r} never happens: steps and attempts count from 1.", hint="step=1")
    return Fault(kind=kind, rank=rank, step=step, point=point, attempt=attempt)


def refuse_idle_faults(faults: Sequence[Fault], *, ranks: int, steps: int | None) -> list[PacelineError]:
    """Return errors for faults whose rank or step does not exist. `steps` is None if the number is not known yet.

    Without this check, a test with such a fault would pass without testing anything.
    """
    problems: list[PacelineError] = []
    for fault in faults:
        if fault.rank >= ranks:
            last = "rank 0 is the only rank" if ranks == 1 else f"ranks are 0 to {ranks - 1}"
            problems.append(
                UsageError(f"the fault on rank {fault.rank} never happens: {last}.", hint=f"rank={ranks - 1}")
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
    """The faults of one rank in one attempt."""

    def __init__(self, faults: Sequence[Fault], *, rank: int, attempt: int) -> None:
        self._by_point_and_step = {(f.point, f.step): f for f in faults if f.rank == rank and f.attempt == attempt}

    @property
    def has_any(self) -> bool:
        """True if this rank has a fault in this attempt."""
        return bool(self._by_point_and_step)

    def fire(self, point: str, *, step: int) -> Fault | None:
        """Inject the fault that is due at this point of this step, and return it; None if there is none.

        The caller injects the fault `nan` itself.
        """
        fault = self._by_point_and_step.get((point, step)) if self._by_point_and_step else None
        if fault is None:
            return None
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind == "exit":
            os._exit(7)
        elif fault.kind == "hang":
            time.sleep(_HANG_SECONDS)
        elif fault.kind == "raise":
            raise RuntimeError(f"injected fault: raise at {point} of step {step}")
        return fault
