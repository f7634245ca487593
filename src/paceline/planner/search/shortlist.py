"""Which of a plan's candidates to time where they would run, and a plan whose seconds are those that were found."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf
from statistics import median
from typing import Any

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.search.branch_and_bound import key_of
from paceline.planner.search.search_space import SearchSpace, candidates

MOST = 9
_EACH = 3  # of a family
_NEAR = 1.6  # times the quickest forecast: as far as a closed form may be wrong
_MOST_LOOKED_AT = 20_000
_LEAST_SECONDS = 1e-6
_PAIRS = ("blocks", "between")


@dataclass(frozen=True, kw_only=True)
class TimingTrial:
    """One layout to time: as it would be typed, with what goes beside it.

    `share` is what it needs of the memory, of which `stays` is there between its steps too; `seconds` are its step's by
    the forecast, 0 where there is none.
    """

    candidate: str
    layout: str
    micro_batch_size: int
    least_blocks: int
    share: float
    stays: float = 0.0
    seconds: float = 0.0
    stages: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """Why a layout could not be timed: its own refusal, or an error of the job's own code (`is_jobs`)."""

    why: str
    is_jobs: bool = False


def shortlist(
    forecast: CostModel, *, grid: SearchSpace | None = None, most: int = MOST, also: Collection[str] = ()
) -> list[Estimate]:
    """The best of each family that fits, and what is forecast to be nearly as quick as the best; the quickest first.

    Candidates whose names are in `also` are there too, where they fit.
    """
    grid = grid or SearchSpace()
    every = islice(candidates(forecast.facts, forecast.fleet, grid), _MOST_LOOKED_AT)
    found = sorted((one for one in map(forecast.estimate, every) if one.fits), key=key_of)
    plain = {one.candidate for one in found}
    found = [one for one in found if one.candidate == _kept(one.candidate) or _kept(one.candidate) not in plain]
    families: dict[str, list[Estimate]] = {}
    for estimate in found:
        families.setdefault(estimate.candidate.family, []).append(estimate)
    chosen = [own[0] for own in families.values()]
    near = [one for one in found if one.step_seconds <= _NEAR * found[0].step_seconds]
    for estimate in near:
        own = families[estimate.candidate.family]
        if len(chosen) < most and estimate is not own[0] and _place(estimate, own, chosen) < _EACH:
            chosen.append(estimate)
    chosen += [one for one in found if str(one.candidate) in also and one not in chosen]
    return sorted(chosen, key=key_of)


def in_turn(options: Sequence[Estimate]) -> list[Estimate]:
    """In the order to time them, as time may run out: first the best of each family that may be the quickest."""
    ordered = sorted(options, key=key_of)
    near = [one for one in ordered if one.step_seconds <= _NEAR * ordered[0].step_seconds]
    best = {one.candidate.family: one for one in reversed(near)}
    return sorted(ordered, key=lambda one: best.get(one.candidate.family) is not one)


def _kept(candidate: Candidate) -> Candidate:
    """The same where nothing is computed again: where that fits too, it is the quicker one."""
    return replace(candidate, remat="none")


def _place(estimate: Estimate, own: Sequence[Estimate], chosen: Sequence[Estimate]) -> int:
    """How many of its family are chosen already."""
    return sum(one in own for one in chosen if one.candidate.family == estimate.candidate.family)


def try_of(estimate: Estimate) -> TimingTrial:
    """What the ranks must know to time it. Each stage needs two blocks, so that one of them has a neighbour."""
    candidate = estimate.candidate
    return TimingTrial(
        candidate=str(candidate),
        layout=str(candidate.asked),
        micro_batch_size=candidate.micro_batch_size,
        least_blocks=2 * candidate.pp * candidate.virtual if candidate.pp > 1 else 2,
        share=estimate.peak_bytes / estimate.limit_bytes,
        stays=estimate.memory.state_bytes / estimate.limit_bytes,
        seconds=estimate.step_seconds,
        stages=estimate.settings.get("place.stages", ""),
    )


def read_kept(kept: Mapping[str, Any]) -> dict[str, MeasuredTime]:
    """What was timed, by candidate, of its JSON.

    Raises: ValueError, KeyError, TypeError of what nobody has written.
    """
    found = {name: MeasuredTime(**{**own, **{pair: tuple(own[pair]) for pair in _PAIRS}}) for name, own in kept.items()}
    if not all(
        _LEAST_SECONDS < one.seconds < inf and 0 <= one.spread < inf and one.steps > 0 for one in found.values()
    ):
        raise ValueError("no step takes that long")
    return found


def retimed(estimates: Sequence[Estimate], timed: Mapping[str, MeasuredTime]) -> list[Estimate]:
    """With the seconds that were found; of what was not timed those of the forecast, as wrong as of the others."""
    usual = usual_ratio(estimates, timed)
    return sorted((as_timed(one, timed, usual=usual) for one in estimates), key=key_of)


def usual_ratio(estimates: Sequence[Estimate], timed: Mapping[str, MeasuredTime]) -> float:
    """Of what was found to what was forecast."""
    ratios = [timed[key].seconds / one.step_seconds for one in estimates if (key := str(one.candidate)) in timed]
    return median(ratios) if ratios else 1.0


def as_timed(estimate: Estimate, timed: Mapping[str, MeasuredTime], *, usual: float) -> Estimate:
    """With its own seconds, or as wrong as is usual."""
    own = timed.get(str(estimate.candidate))
    ratio = usual if own is None else own.seconds / estimate.step_seconds
    return replace(estimate, seconds=estimate.seconds.times(ratio), timed=own)
