"""Goodput of a planned run under failures, at a given checkpoint interval and at the best one."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from paceline.console.formatting import long_duration, plural
from paceline.errors import UsageError
from paceline.planner.simulation.checkpoint_interval import in_steps
from paceline.planner.simulation.goodput import (
    DAY_SECONDS,
    FailureModel,
    FailureSource,
    Goodput,
    combined_failure_interval,
    goodput,
)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The costs of a checkpoint, and how often one is saved.

    Training stops for `stall_seconds`, and the checkpoint is safe `write_seconds` later; after a failure, training
    resumes `restart_seconds` later from the newest safe one. One is saved after `every` steps; None: at the best
    interval.
    """

    stall_seconds: float = 60.0
    write_seconds: float = 0.0
    restart_seconds: float = 300.0
    every: int | None = None


@dataclass(frozen=True, kw_only=True)
class FailureForecast:
    """The goodput of a run: `best` with a checkpoint every `best_every` steps, `asked` with one every `every` steps."""

    ranks: int
    device_mean_seconds: float
    hazard: FailureModel
    step_seconds: float
    best_every: int
    best: Goodput
    every: int | None
    asked: Goodput | None

    @property
    def wins(self) -> float:
        """The gain in useful time, as a fraction of 1, of the best interval over the one asked for."""
        return 0.0 if self.asked is None else self.best.useful - self.asked.useful

    def steps_a_day(self, found: Goodput) -> float:
        """Return the number of steps per day that are kept."""
        return found.useful * DAY_SECONDS / self.step_seconds

    def as_json(self) -> dict[str, Any]:
        """Return the values by name; parts of time are fractions of 1."""
        found: dict[str, Any] = {
            "mean_seconds": self.hazard.mean_seconds,
            "device_mean_seconds": self.device_mean_seconds,
            **{name: getattr(self.hazard, name) for name in ("stall_seconds", "write_seconds", "restart_seconds")},
            "best": self._as_json(self.best_every, self.best),
        }
        if self.asked is not None and self.every is not None:
            found |= {"asked": self._as_json(self.every, self.asked), "wins": self.wins}
        return found

    def lines(self) -> Iterator[str]:
        """Yield the lines for the screen."""
        one, each = long_duration(self.hazard.mean_seconds), long_duration(self.device_mean_seconds)
        yield f"one failure every {one}: each of {plural(self.ranks, 'device')} fails once in {each}"
        hazard = self.hazard
        later = f", and is safe {hazard.write_seconds:g} s later" if hazard.write_seconds else ""
        yield (
            f"  a checkpoint stops training for {hazard.stall_seconds:g} s{later}; "
            f"a failure stops it for {hazard.restart_seconds:g} s"
        )
        if self.asked is not None and self.every is not None:
            yield f"  {self._said(self.every, self.asked)}"
        more = f"; {self.wins:.1%} more useful time than every {self.every:,}" if self.asked is not None else ""
        yield f"  best: {self._said(self.best_every, self.best)}{more}"

    def _as_json(self, every: int, found: Goodput) -> dict[str, Any]:
        return {"every": every, **asdict(found), "steps_a_day": self.steps_a_day(found)}

    def _said(self, every: int, found: Goodput) -> str:
        return (
            f"every {plural(every, 'step')} ({long_duration(found.interval_seconds)}): {found.useful:.1%} useful; "
            f"saving {found.saving:.1%}, restarting {found.restarting:.1%}, repeated {found.redone:.1%}; "
            f"{self.steps_a_day(found):,.0f} steps per day"
        )


def forecast_failures(
    *, step_seconds: float, ranks: int, device_mean_seconds: float, checkpoints: Checkpoints
) -> FailureForecast:
    """Return the goodput of a run in which each of `ranks` devices fails once in `device_mean_seconds`.

    Raises:
        UsageError: a time is invalid, a checkpoint is not safe before the next begins, or failures are so frequent
            that nothing useful is left.
    """
    mean = combined_failure_interval([FailureSource(name="device", count=ranks, mean_seconds=device_mean_seconds)])
    hazard = FailureModel(
        mean_seconds=mean,
        stall_seconds=checkpoints.stall_seconds,
        restart_seconds=checkpoints.restart_seconds,
        write_seconds=checkpoints.write_seconds,
    )
    best_every, every = in_steps(hazard=hazard, step_seconds=step_seconds), checkpoints.every
    best = goodput(hazard=hazard, interval_seconds=best_every * step_seconds)
    if not best.useful > _LEAST:
        raise UsageError(
            f"one failure every {long_duration(mean)} leaves no useful time.",
            cause=f"{plural(ranks, 'device')} that fail once in {long_duration(device_mean_seconds)} each, and "
            f"a step of {long_duration(step_seconds)}",
            hint='--failures is for one device: --failures "50000 h"',
        )
    if every is not None and every < 1:
        raise UsageError(f"--every {every}: the shortest interval is 1 step.", hint="--every 1000")
    asked = None if every is None else goodput(hazard=hazard, interval_seconds=every * step_seconds)
    return FailureForecast(
        ranks=ranks, device_mean_seconds=device_mean_seconds, hazard=hazard, step_seconds=step_seconds,
        best_every=best_every, best=best, every=every, asked=asked,
    )  # fmt: skip


_LEAST = 1e-3
