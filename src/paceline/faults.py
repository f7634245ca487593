"""Faults as data: what breaks, on which rank, at which step and point. For tests, and for `--faults`."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError

KINDS = ("kill", "raise", "nan", "exit", "hang", "stop")
POINTS = ("step", "save", "eval")
_HANG_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault; `step` counts from 1."""

    kind: str
    rank: int
    step: int
    point: str = "step"
    attempt: int = 1


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read `"kill rank=2 step=50; nan rank=1 step=70 point=save"`.

    Raises:
        UsageError: a fault that is not understood.
    """
    return tuple(_parse(part.split()) for part in text.split(";") if part.strip())


def _parse(words: Sequence[str]) -> Fault:
    kind, *rest = words
    pairs = dict(word.partition("=")[::2] for word in rest)
    numbers = {name: pairs.pop(name, "") for name in ("rank", "step", "attempt")}
    point = pairs.pop("point", "step")
    numbers["attempt"] = numbers["attempt"] or "1"
    if kind not in KINDS or point not in POINTS or pairs or not all(n.isdigit() for n in numbers.values()):
        raise UsageError(
            f"the fault {' '.join(words)!r} is not understood.",
            cause=f"kinds: {', '.join(KINDS)}; points: {', '.join(POINTS)}",
            hint='--faults "kill rank=1 step=50"',
        )
    return Fault(
        kind=kind,
        rank=int(numbers["rank"]),
        step=int(numbers["step"]),
        point=point,
        attempt=int(numbers["attempt"]),
    )


class Faults:
    """The faults of one rank in one attempt."""

    def __init__(self, faults: Sequence[Fault], *, rank: int, attempt: int) -> None:
        self._mine = {(f.point, f.step): f for f in faults if f.rank == rank and f.attempt == attempt}

    def fire(self, point: str, *, step: int) -> Fault | None:
        """Break here if a fault says so; `nan` is returned for the caller to act on."""
        fault = self._mine.get((point, step)) if self._mine else None
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
            raise RuntimeError(f"a fault was asked for: raise at {point} of step {step}")
        return fault
