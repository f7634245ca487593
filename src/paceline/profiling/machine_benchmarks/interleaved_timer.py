"""Interleaved timing of many calls, on all ranks at the same time, within a time budget."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

import torch

from paceline.comm.process_group import World
from paceline.planner.hardware.timing_curve import Point, TimingCurve

Call = Callable[[], object]
Key = tuple[str, ...]
ROUNDS = 5
_MOST_ROUNDS = 25
_MOST_CALLS = 2000
_SHORT = 3e-3  # shorter calls are timed more often
_LOOKS = 5
_FEW = 3
_GRACE = 4  # times the limit for the first few sizes: small sizes alone predict little
_AHEAD = 0.3  # of the time for selecting sizes, which the first families may take from the others
_LEAST_WINDOW = 1e-3
_PART = 5e-4  # of a part of a turn: shorter than a scheduler's time slice
_NO_TIME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Size:
    """An amount of work, and a factory of the call that does it; each call does it `times` times."""

    amount: float
    make: Callable[[], Call]
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """A benchmark in several sizes, the smallest first."""

    key: Key
    sizes: Sequence[Size]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A call to time; `seconds` is about what one call takes, the same number on all ranks."""

    key: Key
    size: Size
    call: Call
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SynchronizedRanks:
    """The ranks that measure at the same time, each with the same families."""

    world: World

    def now(self) -> float:
        """Return the time after all work queued on the device is done."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()

    def agree(self, value: float) -> float:
        """Return the maximum over all ranks; all wait for it."""
        told = torch.tensor([value], dtype=torch.float64, device=self.world.device)
        return float(self.world.all_reduce(told, op="max"))


def time_all(
    families: Sequence[Family],
    *,
    world: World,
    seconds: float,
    limit: float,
    join: Callable[[Sequence[float]], float],
    lead: bool = False,
    crowded: bool = False,
) -> dict[Key, TimingCurve]:
    """Return a curve for each family that works here. All ranks of `world` call this, with the same families.

    Sizes are selected in the first half of `seconds`, of which each family has a share. A size is skipped if one call
    would take more than `max_call_seconds`, or a few times that for the second and third; after its share, a family
    gets no more than three sizes. Then all trials take turns, `ROUNDS` times or, if `seconds` are over, less often.
    With `has_untimed_call` each turn begins with a call that is not timed, because a link transfers the first bytes
    after a pause faster. The time of a turn is the median of its parts, because other programs may disturb some; with
    `shares_cores` it is the whole turn, because ranks that wait for a core disturb each other. `combine_ranks` combines
    the times of all ranks in a round into one number.
    """
    together = SynchronizedRanks(world=world)
    began = time.perf_counter()
    ends, whole, sizes = began + seconds, sum(len(family.sizes) for family in families), 0
    trials: list[Trial] = []
    for family in families:
        sizes += len(family.sizes)
        until = began + seconds / 2 * (_AHEAD + (1 - _AHEAD) * sizes / whole)
        trials += _grown(family, together, limit=limit, ends=until)
    left = max(ends - time.perf_counter(), seconds / 4)
    part = inf if crowded or world.device.type == "cuda" else _PART
    found = _rounds(trials, together, seconds=together.agree(left), lead=lead, part=part)
    everybody = world.gather_json(found)
    points: dict[Key, list[Point]] = {}
    for at, trial in enumerate(trials):
        rounds = [join(one) for one in zip(*(rank[at] for rank in everybody), strict=True)]
        points.setdefault(trial.key, []).append(_point(trial.size, rounds))
    return {key: TimingCurve.from_points(own) for key, own in points.items()}


def _grown(family: Family, together: SynchronizedRanks, *, limit: float, ends: float) -> list[Trial]:
    """Return trials of the sizes that are not too slow, as predicted from the smaller ones."""
    found: list[Trial] = []
    for size in family.sizes:
        if found and _expected(found, size.amount) > limit * (_GRACE if len(found) < _FEW else 1):
            break
        if len(found) >= _FEW and together.agree(time.perf_counter() > ends):
            break
        call = _made(size)
        seconds = together.agree(inf if call is None else _spent(call, 1, together))
        if call is None or seconds == inf:
            break
        looks = _LOOKS if seconds < _SHORT else 1  # a single disturbed call must not end the selection
        seconds = min(seconds, together.agree(min(_spent(call, 1, together) for _ in range(looks))))
        found.append(Trial(key=family.key, size=size, call=call, seconds=max(seconds, _NO_TIME)))
    return found


def _expected(found: Sequence[Trial], amount: float) -> float:
    """Return the predicted seconds, on the line through the last two sizes; at most proportional to the last one."""
    last = found[-1]
    if len(found) == 1:
        return last.seconds
    before = found[-2]
    slope = (last.seconds - before.seconds) / (last.size.amount - before.size.amount)
    return last.seconds + min(max(slope, 0.0), last.seconds / last.size.amount) * (amount - last.size.amount)


def _made(size: Size) -> Call | None:
    """Return the call after one trial run; None if this device or build does not support it."""
    try:
        call = size.make()
        call()
    except (RuntimeError, NotImplementedError):
        return None
    return call


def _rounds(
    trials: Sequence[Trial], together: SynchronizedRanks, *, seconds: float, lead: bool, part: float
) -> list[list[float]]:
    """Return each trial's seconds per unit of work, round by round; the last round may be incomplete."""
    found: list[list[float]] = [[] for _ in trials]
    slow = sum(trial.seconds for trial in trials) * (1 + lead)
    window = max((seconds / ROUNDS - slow) / max(len(trials), 1), _LEAST_WINDOW)
    ends = time.perf_counter() + seconds
    for number in range(_MOST_ROUNDS):
        for trial, own in zip(trials, found, strict=True):
            if together.agree(time.perf_counter() > ends) and number:
                return found
            if lead:
                trial.call()
            calls = round(min(max(window / trial.seconds, 1), _MOST_CALLS))
            each = min(calls, max(1, round(min(part / trial.seconds, calls))))
            parts = [_spent(trial.call, each, together) for _ in range(calls // each)]
            own.append(median(parts) / (each * trial.size.times))
    return found


def _spent(call: Call, calls: int, together: SynchronizedRanks) -> float:
    began = together.now()
    for _ in range(calls):
        call()
    return together.now() - began


def _point(size: Size, rounds: Sequence[float]) -> Point:
    middle = max(median(rounds), _NO_TIME)
    return Point(amount=size.amount, seconds=middle, spread=median(abs(one - middle) for one in rounds) / middle)
