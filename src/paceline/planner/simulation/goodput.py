"""Compute the goodput of a long run with failures: the useful fraction of its time for a checkpoint interval.

The times between failures are exponentially distributed, also while a checkpoint is written and while the run restarts.
After a failure, the run restarts from the newest checkpoint that is completely written.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, expm1, inf, isfinite
from random import Random

from paceline.errors import UsageError

DAY_SECONDS = 86_400.0
_OPTIONS = {
    "stall_seconds": "--checkpoint-seconds",
    "restart_seconds": "--restart-seconds",
    "write_seconds": "--write-seconds",
}


@dataclass(frozen=True, kw_only=True)
class FailureSource:
    """Components of one kind that may fail, such as the devices of a run."""

    name: str
    count: int
    """The number of components."""
    mean_seconds: float
    """The mean time between two failures of one component."""


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """The times of failures and checkpoints of a run.

    Raises:
        UsageError: `mean_seconds` is not above 0, or another time is negative or not finite.
    """

    mean_seconds: float
    """The mean time between two failures of the whole run; `combined_failure_interval` computes it."""
    stall_seconds: float
    """The time for which a checkpoint stops training."""
    restart_seconds: float = 0.0
    """The time for which a failure stops training: detection, start of the processes, loading."""
    write_seconds: float = 0.0
    """The time from the end of the stall until the checkpoint is completely written."""

    def __post_init__(self) -> None:
        if not self.mean_seconds > 0:
            raise UsageError(
                f"{self.mean_seconds:g} seconds between two failures: more than 0 are needed.",
                hint="the mean time between failures of one device, divided by the number of devices",
            )
        for name in _OPTIONS:
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise UsageError(f"{name}={value:g} ({_OPTIONS[name]}): a time of 0 seconds or more is needed.")

    @property
    def rate(self) -> float:
        """The number of failures per second."""
        return 1 / self.mean_seconds


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The parts of a long run's time. The fractions `useful`, `saving`, `restarting` and `redone` sum to 1."""

    interval_seconds: float
    """The training time between two checkpoints."""
    useful: float
    """Training that no failure discards."""
    saving: float
    """The stalls of checkpoints that no failure discards."""
    restarting: float
    """The time from failures until training resumes."""
    redone: float
    """Training and saving that failures discard."""
    failures_a_day: float
    """The mean number of failures per day."""


def combined_failure_interval(sources: Iterable[FailureSource]) -> float:
    """Return the mean seconds between two failures of any component; the failure rates add up.

    Raises:
        UsageError: a count is below 0, or a mean is not above 0.
    """
    rate = 0.0
    for source in sources:
        if source.count < 0 or not source.mean_seconds > 0:
            description = f"{source.count} × {source.name!r} that fail once in {source.mean_seconds:g} seconds"
            raise UsageError(
                f"{description}: a count of 0 or more and a time above 0 are needed.",
                hint="mean_seconds is for one component; 50,000 hours are 180_000_000",
            )
        rate += source.count / source.mean_seconds
    return 1 / rate if rate else inf


def goodput(*, hazard: FailureModel, interval_seconds: float) -> Goodput:
    """Return the goodput with a checkpoint after every `interval_seconds` of training; exact for a long run.

    A segment is an interval i and a stall s. The next segment begins while the checkpoint is still being written, which
    takes w seconds. Let λ be the failures per second and R the restart time. Let x be the mean time of a segment that
    begins when the previous checkpoint is already written, and y that of a segment that begins before. A failure costs
    a restart and repeats the segment. In the second case, a failure within w also repeats the previous segment:

        x = (e^(λ(i+s)) - 1) e^(λR) / λ,    y = e^(λw) x

    A segment that follows a finished segment begins before the checkpoint is written, so the useful fraction is i / y.
    With w = 0, this is the model of Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart
    dumps"). A write time w has the same effect as a restart that takes w longer.

    Raises:
        UsageError: the interval is not above 0, or shorter than the time to write a checkpoint.
    """
    _refuse_bad_interval(hazard, interval_seconds)
    rate = hazard.rate
    segment = interval_seconds + hazard.stall_seconds
    try:
        mean_segment_seconds = exp(rate * (hazard.write_seconds + hazard.restart_seconds)) * _growth_over_rate(
            rate, segment
        )
    except OverflowError:
        mean_segment_seconds = inf
    useful, saving = interval_seconds / mean_segment_seconds, hazard.stall_seconds / mean_segment_seconds
    restarting = -expm1(-rate * hazard.restart_seconds)
    return Goodput(
        interval_seconds=interval_seconds,
        useful=useful,
        saving=saving,
        restarting=restarting,
        redone=max(0.0, 1 - useful - saving - restarting),
        failures_a_day=rate * DAY_SECONDS,
    )


def useful_fraction_by_simulation(*, hazard: FailureModel, interval_seconds: float, segments: int, seed: int) -> float:
    """Return `Goodput.useful` by the naive method, which simulates one random run.

    The run ends when the checkpoints of `segments` segments are written. This takes long if little time is useful.
    """
    _refuse_bad_interval(hazard, interval_seconds)
    rng = Random(seed)
    now, next_failure = 0.0, _time_to_failure(rng, hazard)
    num_done = num_safe = 0  # finished segments; segments whose checkpoint is written
    write_start = -inf  # the time at which the write of the newest checkpoint began
    while num_safe < segments:
        write_end, end = write_start + hazard.write_seconds, now + interval_seconds + hazard.stall_seconds
        if next_failure >= end:
            now, num_done, num_safe, write_start = end, num_done + 1, num_done, end
            continue
        if next_failure >= write_end:
            num_safe = num_done
        now = next_failure
        while (next_failure := now + _time_to_failure(rng, hazard)) < now + hazard.restart_seconds:
            now = next_failure
        now, num_done, write_start = now + hazard.restart_seconds, num_safe, -inf
    return segments * interval_seconds / now


def _time_to_failure(rng: Random, hazard: FailureModel) -> float:
    """Return a random time until the next failure."""
    return rng.expovariate(hazard.rate) if hazard.rate else inf


def _refuse_bad_interval(hazard: FailureModel, interval_seconds: float) -> None:
    """Raise UsageError if the interval is not above 0, or too short to write a checkpoint."""
    if not (isfinite(interval_seconds) and interval_seconds > 0):
        raise UsageError(
            f"interval_seconds={interval_seconds:g}: the interval must be above 0.",
            hint="paceline.planner.simulation.checkpoint_interval.best_interval gives the best one",
        )
    if interval_seconds < hazard.write_seconds:
        raise UsageError(
            f"a checkpoint every {interval_seconds:g} s takes {hazard.write_seconds:g} s to write.",
            cause="the next checkpoint would begin before the last one is written",
            hint=f"an interval of {hazard.write_seconds:g} s at least",
        )


def _growth_over_rate(rate: float, seconds: float) -> float:
    """Return (e^(λt) - 1) / λ, or t if λ is 0."""
    return expm1(rate * seconds) / rate if rate else seconds
