"""Goodput of a long run with failures: its useful fraction of time for a checkpoint interval.

Failures are memoryless (exponentially distributed), also while a checkpoint is written and while the run restarts.
After a failure, the run restarts from the newest finished checkpoint; if the newest one is not finished, from the one
before.
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
    """A group of `count` parts of one kind, each of which fails once in `mean_seconds` on average."""

    name: str
    count: int
    mean_seconds: float


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """The failure and checkpoint times of a run, in seconds.

    `mean_seconds` is the mean time between two failures of the whole run (`combined_failure_interval` computes it from
    parts). A checkpoint stops training for `stall_seconds` and is safe `write_seconds` after training resumed. From a
    failure until training resumes, `restart_seconds` pass: detecting, starting, loading.

    Raises:
        UsageError: `mean_seconds` is not above 0, or another time is negative or not finite.
    """

    mean_seconds: float
    stall_seconds: float
    restart_seconds: float = 0.0
    write_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.mean_seconds > 0:
            raise UsageError(
                f"{self.mean_seconds:g} seconds between two failures: more than 0 are needed.",
                hint="the mean time between failures of one device, divided by their number",
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
    """The division of a long run's time into four parts that sum to 1, with `failures_a_day` on average.

    `useful` is training that is kept, `saving` the stalls of the checkpoints that are kept, `restarting` the time until
    training resumes, `redone` what was trained or saved and lost.
    """

    interval_seconds: float
    useful: float
    saving: float
    restarting: float
    redone: float
    failures_a_day: float


def combined_failure_interval(parts: Iterable[FailureSource]) -> float:
    """Return the mean seconds between two failures of any part: their rates add up.

    Raises:
        UsageError: a count is below 0, or a mean is not above 0.
    """
    rate = 0.0
    for part in parts:
        if part.count < 0 or not part.mean_seconds > 0:
            what = f"{part.count} × {part.name!r} that fail once in {part.mean_seconds:g} seconds"
            raise UsageError(
                f"{what}: a count of 0 or more and a time above 0 are needed.",
                hint="mean_seconds is for one part; 50,000 hours are 180_000_000",
            )
        rate += part.count / part.mean_seconds
    return 1 / rate if rate else inf


def goodput(*, hazard: FailureModel, interval_seconds: float) -> Goodput:
    """Return the goodput with a checkpoint after every `interval_seconds` of training; exact for a long run.

    A segment is an interval i and a stall s; the next begins while this one's checkpoint is still being written, for w
    seconds. Let λ be the failures per second, R the restart, x the mean time of a segment that begins on a finished
    checkpoint and y of one that begins on an unfinished one. Each failure costs a restart and begins the segment again;
    one of the second kind that fails within w must also repeat the segment before:

        x = (e^(λ(i+s)) - 1) e^(λR) / λ,    y = e^(λw) x

    A restart falls back on a finished checkpoint, so every segment that ends is followed by one of the second kind, and
    i / y is useful. With w = 0 this is the model of Daly 2006 ("A higher order estimate of the optimum checkpoint
    interval for restart dumps"): a write costs what a longer restart would.

    Raises:
        UsageError: the interval is not above 0, or shorter than the time to write a checkpoint.
    """
    _refuse_bad_interval(hazard, interval_seconds)
    rate = hazard.rate
    segment = interval_seconds + hazard.stall_seconds
    try:
        mean = exp(rate * (hazard.write_seconds + hazard.restart_seconds)) * _over_rate(rate, segment)
    except OverflowError:
        mean = inf
    useful, saving = interval_seconds / mean, hazard.stall_seconds / mean
    restarting = -expm1(-rate * hazard.restart_seconds)
    return Goodput(
        interval_seconds=interval_seconds,
        useful=useful,
        saving=saving,
        restarting=restarting,
        redone=max(0.0, 1 - useful - saving - restarting),
        failures_a_day=rate * DAY_SECONDS,
    )


def by_chance(*, hazard: FailureModel, interval_seconds: float, segments: int, seed: int) -> float:
    """Return `Goodput.useful` of one random run of `segments` kept segments: the naive version, failure by failure.

    It takes long if little time is useful.
    """
    _refuse_bad_interval(hazard, interval_seconds)
    chance = Random(seed)
    now, fails = 0.0, _wait(chance, hazard)
    done = safe = 0  # segments ended; segments whose checkpoint is finished
    began = -inf  # when the newest checkpoint began to be written
    while safe < segments:
        written, end = began + hazard.write_seconds, now + interval_seconds + hazard.stall_seconds
        if fails >= end:
            now, done, safe, began = end, done + 1, done, end
            continue
        if fails >= written:
            safe = done
        now = fails
        while (fails := now + _wait(chance, hazard)) < now + hazard.restart_seconds:
            now = fails
        now, done, began = now + hazard.restart_seconds, safe, -inf
    return segments * interval_seconds / now


def _wait(chance: Random, hazard: FailureModel) -> float:
    return chance.expovariate(hazard.rate) if hazard.rate else inf


def _refuse_bad_interval(hazard: FailureModel, interval_seconds: float) -> None:
    if not (isfinite(interval_seconds) and interval_seconds > 0):
        raise UsageError(
            f"interval_seconds={interval_seconds:g}: the interval must be above 0.",
            hint="paceline.planner.simulation.checkpoint_interval.best_interval gives the best one",
        )
    if interval_seconds < hazard.write_seconds:
        raise UsageError(
            f"a checkpoint every {interval_seconds:g} s that takes {hazard.write_seconds:g} s to write.",
            cause="the next one would begin before the last one is written",
            hint=f"an interval of {hazard.write_seconds:g} s at least",
        )


def _over_rate(rate: float, seconds: float) -> float:
    """Return (e^(λt) - 1) / λ; t if nothing fails."""
    return expm1(rate * seconds) / rate if rate else seconds
