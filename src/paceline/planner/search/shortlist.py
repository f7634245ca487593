"""Choice of the candidates of a plan to time on the target cluster, and estimates with the measured seconds."""

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
_EACH = 3  # at most, of one family
_NEAR = 1.6  # times the fastest forecast: closed forms may be wrong by this much
_MOST_LOOKED_AT = 20_000
_LEAST_SECONDS = 1e-6
_PAIRS = ("blocks", "between")


@dataclass(frozen=True, kw_only=True)
class TimingTrial:
    """A layout to time, as a user would type it, with its settings.

    `share` is its peak as a fraction of the usable memory, `stays` the fraction that persists between steps; `seconds`
    is the forecast step time, 0 if there is none.
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
        """Return its fields, for the other ranks."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """The reason why a layout could not be timed: its own refusal, or an error of the job's code (`is_jobs`)."""

    why: str
    is_jobs: bool = False


def shortlist(
    forecast: CostModel, *, grid: SearchSpace | None = None, most: int = MOST, also: Collection[str] = ()
) -> list[Estimate]:
    """Return the best fitting candidate of each family and those forecast to be nearly as fast; fastest first.

    Candidates whose names are in `also` are included if they fit.
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
    """Return the order in which to time them, as time may run out: the best of each promising family first."""
    ordered = sorted(options, key=key_of)
    near = [one for one in ordered if one.step_seconds <= _NEAR * ordered[0].step_seconds]
    best = {one.candidate.family: one for one in reversed(near)}
    return sorted(ordered, key=lambda one: best.get(one.candidate.family) is not one)


def _kept(candidate: Candidate) -> Candidate:
    """Return the candidate without activation checkpointing: if that fits too, it is the faster one."""
    return replace(candidate, remat="none")


def _place(estimate: Estimate, own: Sequence[Estimate], chosen: Sequence[Estimate]) -> int:
    """Return how many of its family are chosen already."""
    return sum(one in own for one in chosen if one.candidate.family == estimate.candidate.family)


def try_of(estimate: Estimate) -> TimingTrial:
    """Return what the ranks need to time a layout. Each stage needs two blocks, so that a block has a neighbour."""
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
    """Return the measured times by candidate, read from their JSON.

    Raises:
        ValueError, KeyError, TypeError: the content is not valid.
    """
    found = {name: MeasuredTime(**{**own, **{pair: tuple(own[pair]) for pair in _PAIRS}}) for name, own in kept.items()}
    if not all(
        _LEAST_SECONDS < one.seconds < inf and 0 <= one.spread < inf and one.steps > 0 for one in found.values()
    ):
        raise ValueError("no step takes that long")
    return found


def retimed(estimates: Sequence[Estimate], timed: Mapping[str, MeasuredTime]) -> list[Estimate]:
    """Return the estimates with measured seconds, sorted; untimed forecasts are scaled by the usual ratio."""
    usual = usual_ratio(estimates, timed)
    return sorted((as_timed(one, timed, usual=usual) for one in estimates), key=key_of)


def usual_ratio(estimates: Sequence[Estimate], timed: Mapping[str, MeasuredTime]) -> float:
    """Return the median ratio of measured to forecast seconds, 1 if nothing was timed."""
    ratios = [timed[key].seconds / one.step_seconds for one in estimates if (key := str(one.candidate)) in timed]
    return median(ratios) if ratios else 1.0


def as_timed(estimate: Estimate, timed: Mapping[str, MeasuredTime], *, usual: float) -> Estimate:
    """Return the estimate with its own measured seconds, or its forecast scaled by the `usual` ratio."""
    own = timed.get(str(estimate.candidate))
    ratio = usual if own is None else own.seconds / estimate.step_seconds
    return replace(estimate, seconds=estimate.seconds.times(ratio), timed=own)
