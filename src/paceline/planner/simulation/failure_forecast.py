"""Forecast the goodput of a planned run under failures, at a given checkpoint interval and at the best one."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from paceline.console.formatting import long_duration, plural
from paceline.errors import UsageError
from paceline.planner.simulation.checkpoint_interval import best_interval_in_steps
from paceline.planner.simulation.goodput import (
    DAY_SECONDS,
    FailureModel,
    FailureSource,
    Goodput,
    combined_failure_interval,
    goodput,
)


@dataclass(frozen=True, kw_only=True)
class CheckpointCosts:
    """The costs of checkpoints and restarts, and the checkpoint interval that the user requested."""

    stall_seconds: float = 60.0
    """The time for which a checkpoint stops training."""
    write_seconds: float = 0.0
    """The time from the end of the stall until the checkpoint is completely written."""
    restart_seconds: float = 300.0
    """The time from a failure until training resumes from the newest written checkpoint."""
    every: int | None = None
    """The requested number of steps between two checkpoints; None to forecast only the best interval."""


@dataclass(frozen=True, kw_only=True)
class FailureForecast:
    """The goodput of a run under failures, at the best checkpoint interval and at the requested one."""

    ranks: int
    device_mean_seconds: float
    """The mean time between two failures of one device."""
    hazard: FailureModel
    """The failures of the whole run."""
    step_seconds: float
    best_every: int
    """The best number of steps between two checkpoints."""
    best: Goodput
    """The goodput with `best_every`."""
    every: int | None
    """The requested number of steps between two checkpoints; None if none was requested."""
    requested: Goodput | None
    """The goodput with `every`."""

    @property
    def gain(self) -> float:
        """The useful fraction at the best interval minus that at the requested one; 0 if none was requested."""
        return 0.0 if self.requested is None else self.best.useful - self.requested.useful

    def steps_a_day(self, result: Goodput) -> float:
        """Return the number of steps per day that no failure discards, with this goodput."""
        return result.useful * DAY_SECONDS / self.step_seconds

    def as_json(self) -> dict[str, Any]:
        """Return the values by name. The parts of a `Goodput` are fractions of the run's time."""
        values: dict[str, Any] = {
            "mean_seconds": self.hazard.mean_seconds,
            "device_mean_seconds": self.device_mean_seconds,
            **{name: getattr(self.hazard, name) for name in ("stall_seconds", "write_seconds", "restart_seconds")},
            "best": self._as_json(self.best_every, self.best),
        }
        if self.requested is not None and self.every is not None:
            values |= {"asked": self._as_json(self.every, self.requested), "wins": self.gain}
        return values

    def lines(self) -> Iterator[str]:
        """Yield the lines for the screen."""
        mean, device_mean = long_duration(self.hazard.mean_seconds), long_duration(self.device_mean_seconds)
        yield f"one failure every {mean}: each of {plural(self.ranks, 'device')} fails once in {device_mean}"
        hazard = self.hazard
        write_note = f", and is safe {hazard.write_seconds:g} s later" if hazard.write_seconds else ""
        yield (
            f"  a checkpoint stops training for {hazard.stall_seconds:g} s{write_note}; "
            f"a failure stops it for {hazard.restart_seconds:g} s"
        )
        if self.requested is not None and self.every is not None:
            yield f"  {self._goodput_text(self.every, self.requested)}"
        gain_note = (
            f"; {self.gain:.1%} more useful time than every {self.every:,}" if self.requested is not None else ""
        )
        yield f"  best: {self._goodput_text(self.best_every, self.best)}{gain_note}"

    def _as_json(self, every: int, result: Goodput) -> dict[str, Any]:
        return {"every": every, **asdict(result), "steps_a_day": self.steps_a_day(result)}

    def _goodput_text(self, every: int, result: Goodput) -> str:
        return (
            f"every {plural(every, 'step')} ({long_duration(result.interval_seconds)}): {result.useful:.1%} useful; "
            f"saving {result.saving:.1%}, restarting {result.restarting:.1%}, repeated {result.redone:.1%}; "
            f"{self.steps_a_day(result):,.0f} steps per day"
        )


def forecast_failures(
    *, step_seconds: float, ranks: int, device_mean_seconds: float, checkpoints: CheckpointCosts
) -> FailureForecast:
    """Return the goodput of a run in which each of `ranks` devices fails once in `device_mean_seconds`.

    Raises:
        UsageError: a time is invalid, a checkpoint is not written before the next begins, or failures are so frequent
            that no useful time is left.
    """
    mean = combined_failure_interval([FailureSource(name="device", count=ranks, mean_seconds=device_mean_seconds)])
    hazard = FailureModel(
        mean_seconds=mean,
        stall_seconds=checkpoints.stall_seconds,
        restart_seconds=checkpoints.restart_seconds,
        write_seconds=checkpoints.write_seconds,
    )
    best_every, every = best_interval_in_steps(hazard=hazard, step_seconds=step_seconds), checkpoints.every
    best = goodput(hazard=hazard, interval_seconds=best_every * step_seconds)
    if not best.useful > _MIN_USEFUL:
        raise UsageError(
            f"one failure every {long_duration(mean)} leaves no useful time.",
            cause=f"{plural(ranks, 'device')} that fail once in {long_duration(device_mean_seconds)} each, and "
            f"a step of {long_duration(step_seconds)}",
            hint='--failures is for one device: --failures "50000 h"',
        )
    if every is not None and every < 1:
        raise UsageError(f"--every {every}: the shortest interval is 1 step.", hint="--every 1000")
    requested = None if every is None else goodput(hazard=hazard, interval_seconds=every * step_seconds)
    return FailureForecast(
        ranks=ranks, device_mean_seconds=device_mean_seconds, hazard=hazard, step_seconds=step_seconds,
        best_every=best_every, best=best, every=every, requested=requested,
    )  # fmt: skip


_MIN_USEFUL = 1e-3
