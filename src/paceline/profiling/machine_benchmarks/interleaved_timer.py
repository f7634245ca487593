"""Time many calls in turn, on all ranks at the same time, within a time limit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

import torch

from paceline.comm.process_group import World
from paceline.planner.hardware.timing_curve import Point, TimingCurve

Call = Callable[[], object]
Key = tuple[str, ...]  # of a benchmark family: its kind and further properties
ROUNDS = 5  # planned; the number of calls in a turn is chosen accordingly
_MAX_ROUNDS = 25
_MAX_CALLS = 2000  # in one turn
_SHORT_SECONDS = 3e-3  # a call that takes less is timed _SHORT_REPEATS times when sizes are selected
_SHORT_REPEATS = 5
_MIN_SIZES = 3  # of a family
_FIRST_SIZES_FACTOR = 4  # multiplies the limit of a call for the first _MIN_SIZES: few small sizes predict little
_FIRST_FAMILIES_SHARE = 0.3  # of the time for selecting sizes: the first families may use it in addition to their share
_MIN_TURN_SECONDS = 1e-3
_PART_SECONDS = 5e-4  # of a part of a turn: shorter than the time slice of the system's scheduler
_MIN_SECONDS = 1e-9


@dataclass(frozen=True, kw_only=True)
class BenchmarkSize:
    """One size of a benchmark: the amount of work (FLOPs or bytes), and a factory of the call that does this work.

    Each call does the amount `times` times.
    """

    amount: float
    make_call: Callable[[], Call]
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class BenchmarkFamily:
    """A benchmark in several sizes, the smallest first. `key` identifies its curve."""

    key: Key
    sizes: Sequence[BenchmarkSize]


@dataclass(frozen=True, kw_only=True)
class TimedCall:
    """A call that is timed. `seconds` is the approximate time of one call, equal on all ranks."""

    key: Key
    size: BenchmarkSize
    call: Call
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SynchronizedRanks:
    """The ranks that measure the same families at the same time."""

    world: World

    def read_clock(self) -> float:
        """Wait until all work queued on the device is done, and return the time."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()

    def max_over_ranks(self, value: float) -> float:
        """Return the maximum over all ranks. All ranks call this and wait for each other."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.world.device)
        return float(self.world.all_reduce(tensor, op="max"))


def time_families(
    families: Sequence[BenchmarkFamily],
    *,
    world: World,
    seconds: float,
    max_call_seconds: float,
    combine_ranks: Callable[[Sequence[float]], float],
    has_untimed_call: bool = False,
    shares_cores: bool = False,
) -> dict[Key, TimingCurve]:
    """Return the timing curve of each family that works on this device. All ranks of `world` call this.

    The first half of `seconds` is for selecting sizes, and each family has a share of it. A family ends before the
    first size whose call would take more than `max_call_seconds`. For its second and third size, the limit is higher. A
    family that has used its share gets no more than three sizes.

    The second half is for rounds. In each round every selected size has a turn of several timed calls. With
    `has_untimed_call`, a turn begins with a call that is not timed, because a link transfers the first bytes after a
    pause faster. A turn has short parts, and its result is their median, because other programs may disturb some parts.
    With `shares_cores` a turn has only one part, because ranks that wait for a core disturb each other. On a GPU a turn
    has only one part too, because the end of each part waits for the GPU. `combine_ranks` combines the results of all
    ranks in a round into one number.
    """
    ranks = SynchronizedRanks(world=world)
    start_time = time.perf_counter()
    deadline, num_sizes, num_selected = start_time + seconds, sum(len(family.sizes) for family in families), 0
    trials: list[TimedCall] = []
    for family in families:
        num_selected += len(family.sizes)
        family_deadline = start_time + seconds / 2 * (
            _FIRST_FAMILIES_SHARE + (1 - _FIRST_FAMILIES_SHARE) * num_selected / num_sizes
        )
        trials += _select_sizes(family, ranks, max_call_seconds=max_call_seconds, deadline=family_deadline)
    remaining = max(deadline - time.perf_counter(), seconds / 4)
    part_seconds = inf if shares_cores or world.device.type == "cuda" else _PART_SECONDS
    rounds_by_trial = _time_rounds(
        trials,
        ranks,
        seconds=ranks.max_over_ranks(remaining),
        has_untimed_call=has_untimed_call,
        part_seconds=part_seconds,
    )
    rounds_by_rank = world.gather_json(rounds_by_trial)
    points: dict[Key, list[Point]] = {}
    for index, trial in enumerate(trials):
        rounds = [
            combine_ranks(rank_seconds) for rank_seconds in zip(*(rank[index] for rank in rounds_by_rank), strict=True)
        ]
        points.setdefault(trial.key, []).append(_curve_point(trial.size, rounds))
    return {key: TimingCurve.from_points(family_points) for key, family_points in points.items()}


def _select_sizes(
    family: BenchmarkFamily, ranks: SynchronizedRanks, *, max_call_seconds: float, deadline: float
) -> list[TimedCall]:
    """Return the calls to time: from the smallest size to the last one that is not too slow.

    The time of a size is predicted from the smaller sizes, before it is called.
    """
    trials: list[TimedCall] = []
    for size in family.sizes:
        if trials and _predict_seconds(trials, size.amount) > max_call_seconds * (
            _FIRST_SIZES_FACTOR if len(trials) < _MIN_SIZES else 1
        ):
            break
        if len(trials) >= _MIN_SIZES and ranks.max_over_ranks(time.perf_counter() > deadline):
            break
        call = _make_call(size)
        seconds = ranks.max_over_ranks(inf if call is None else _time_calls(call, 1, ranks))
        if call is None or seconds == inf:
            break
        num_repeats = (
            _SHORT_REPEATS if seconds < _SHORT_SECONDS else 1
        )  # a single disturbed call must not end the selection
        seconds = min(seconds, ranks.max_over_ranks(min(_time_calls(call, 1, ranks) for _ in range(num_repeats))))
        trials.append(TimedCall(key=family.key, size=size, call=call, seconds=max(seconds, _MIN_SECONDS)))
    return trials


def _predict_seconds(trials: Sequence[TimedCall], amount: float) -> float:
    """Return the predicted seconds of a call, extrapolated from the last two sizes.

    The prediction is at least the time of the last size. It is at most this time multiplied by the ratio of `amount` to
    the last size's amount.
    """
    last = trials[-1]
    if len(trials) == 1:
        return last.seconds
    previous = trials[-2]
    slope = (last.seconds - previous.seconds) / (last.size.amount - previous.size.amount)
    return last.seconds + min(max(slope, 0.0), last.seconds / last.size.amount) * (amount - last.size.amount)


def _make_call(size: BenchmarkSize) -> Call | None:
    """Make the call and run it once. Return the call, or None if this device or build does not support it."""
    try:
        call = size.make_call()
        call()
    except (RuntimeError, NotImplementedError):
        return None
    return call


def _time_rounds(
    trials: Sequence[TimedCall],
    ranks: SynchronizedRanks,
    *,
    seconds: float,
    has_untimed_call: bool,
    part_seconds: float,
) -> list[list[float]]:
    """Return, for each trial, the seconds for its amount of work in each round. The last round may be incomplete."""
    rounds_by_trial: list[list[float]] = [[] for _ in trials]
    # A turn takes at most `turn_seconds` plus the time of one call, because it has at least one call. So each round
    # reserves the time of one call for every trial, and also the time of the untimed calls.
    reserved_seconds = sum(trial.seconds for trial in trials) * (1 + has_untimed_call)
    turn_seconds = max((seconds / ROUNDS - reserved_seconds) / max(len(trials), 1), _MIN_TURN_SECONDS)
    deadline = time.perf_counter() + seconds
    for number in range(_MAX_ROUNDS):
        for trial, trial_rounds in zip(trials, rounds_by_trial, strict=True):
            if ranks.max_over_ranks(time.perf_counter() > deadline) and number:
                return rounds_by_trial
            if has_untimed_call:
                trial.call()
            calls = round(min(max(turn_seconds / trial.seconds, 1), _MAX_CALLS))
            calls_per_part = min(calls, max(1, round(min(part_seconds / trial.seconds, calls))))
            parts = [_time_calls(trial.call, calls_per_part, ranks) for _ in range(calls // calls_per_part)]
            trial_rounds.append(median(parts) / (calls_per_part * trial.size.times))
    return rounds_by_trial


def _time_calls(call: Call, calls: int, ranks: SynchronizedRanks) -> float:
    """Return the seconds of this number of calls."""
    start_time = ranks.read_clock()
    for _ in range(calls):
        call()
    return ranks.read_clock() - start_time


def _curve_point(size: BenchmarkSize, rounds: Sequence[float]) -> Point:
    """Return the median and the spread of the seconds in each round."""
    median_seconds = max(median(rounds), _MIN_SECONDS)
    return Point(
        amount=size.amount,
        seconds=median_seconds,
        spread=median(abs(seconds - median_seconds) for seconds in rounds) / median_seconds,
    )
