"""Choose the candidates of a plan that are timed on the target cluster, and put measured seconds into estimates."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf
from statistics import median
from typing import Any

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.search.branch_and_bound import sort_key
from paceline.planner.search.search_space import SearchSpace, candidates

MAX_TRIALS = 9
_MAX_PER_FAMILY = 3
_NEAR_RATIO = 1.6  # relative to the fastest forecast: closed forms may be wrong by this factor
_MAX_CANDIDATES = 20_000
_MIN_SECONDS = 1e-6
_TUPLE_FIELDS = ("blocks", "between")


@dataclass(frozen=True, kw_only=True)
class TimingTrial:
    """A layout to time, as a user would type it, with its settings.

    `peak_fraction` is the peak as a fraction of the usable memory, `state_fraction` that of the training state;
    `seconds` is the forecast step time, 0 if there is none.
    """

    candidate: str
    layout: str
    micro_batch_size: int
    min_blocks: int
    peak_fraction: float
    state_fraction: float = 0.0
    seconds: float = 0.0
    stages: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for the other ranks."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """The reason why a layout could not be timed: Paceline refused it, or the job's code failed (`is_job_error`)."""

    reason: str
    is_job_error: bool = False


def shortlist(
    cost_model: CostModel,
    *,
    grid: SearchSpace | None = None,
    max_trials: int = MAX_TRIALS,
    extra_candidates: Collection[str] = (),
) -> list[Estimate]:
    """Return the best fitting candidate of each family and others that are nearly as fast, the fastest first.

    The candidates named in `extra_candidates` are included if they fit.
    """
    grid = grid or SearchSpace()
    considered = islice(candidates(cost_model.profile, cost_model.cluster, grid), _MAX_CANDIDATES)
    fitting = sorted((one for one in map(cost_model.estimate, considered) if one.fits), key=sort_key)
    fitting_candidates = {one.candidate for one in fitting}
    fitting = [
        one
        for one in fitting
        if one.candidate == _without_remat(one.candidate) or _without_remat(one.candidate) not in fitting_candidates
    ]
    families: dict[str, list[Estimate]] = {}
    for estimate in fitting:
        families.setdefault(estimate.candidate.family, []).append(estimate)
    chosen = [family_estimates[0] for family_estimates in families.values()]
    nearly_as_fast = [one for one in fitting if one.step_seconds <= _NEAR_RATIO * fitting[0].step_seconds]
    for estimate in nearly_as_fast:
        family_estimates = families[estimate.candidate.family]
        if (
            len(chosen) < max_trials
            and estimate is not family_estimates[0]
            and _num_chosen_of_family(estimate, family_estimates, chosen) < _MAX_PER_FAMILY
        ):
            chosen.append(estimate)
    chosen += [one for one in fitting if str(one.candidate) in extra_candidates and one not in chosen]
    return sorted(chosen, key=sort_key)


def timing_order(options: Sequence[Estimate]) -> list[Estimate]:
    """Return the order in which to time candidates: the best of each promising family first, as time may run out."""
    ordered = sorted(options, key=sort_key)
    nearly_as_fast = [one for one in ordered if one.step_seconds <= _NEAR_RATIO * ordered[0].step_seconds]
    best_of_family = {one.candidate.family: one for one in reversed(nearly_as_fast)}
    return sorted(ordered, key=lambda one: best_of_family.get(one.candidate.family) is not one)


def _without_remat(candidate: Candidate) -> Candidate:
    """Return the candidate without activation checkpointing. It is faster, so it is preferred if it fits."""
    return replace(candidate, remat="none")


def _num_chosen_of_family(estimate: Estimate, family_estimates: Sequence[Estimate], chosen: Sequence[Estimate]) -> int:
    """Return how many candidates of the estimate's family are chosen already."""
    return sum(one in family_estimates for one in chosen if one.candidate.family == estimate.candidate.family)


def timing_trial(estimate: Estimate) -> TimingTrial:
    """Return what the ranks need to time a layout. Each stage has at least two blocks, so that each has a neighbour."""
    candidate = estimate.candidate
    return TimingTrial(
        candidate=str(candidate),
        layout=str(candidate.layout_spec),
        micro_batch_size=candidate.micro_batch_size,
        min_blocks=2 * candidate.pp * candidate.virtual if candidate.pp > 1 else 2,
        peak_fraction=estimate.peak_bytes / estimate.limit_bytes,
        state_fraction=estimate.memory.state_bytes / estimate.limit_bytes,
        seconds=estimate.step_seconds,
        stages=estimate.settings.get("place.stages", ""),
    )


def parse_measured_times(stored: Mapping[str, Any]) -> dict[str, MeasuredTime]:
    """Return the measured times by candidate, read from their JSON.

    Raises:
        ValueError, KeyError, TypeError: the content is not valid.
    """
    measured_times = {
        name: MeasuredTime(**{**fields, **{key: tuple(fields[key]) for key in _TUPLE_FIELDS}})
        for name, fields in stored.items()
    }
    if not all(
        _MIN_SECONDS < one.seconds < inf and 0 <= one.spread < inf and one.steps > 0 for one in measured_times.values()
    ):
        raise ValueError("no step takes that long")
    return measured_times


def apply_measured_times(estimates: Sequence[Estimate], measured_times: Mapping[str, MeasuredTime]) -> list[Estimate]:
    """Return the estimates with measured seconds, sorted. Untimed forecasts are scaled by the median time ratio."""
    default_ratio = median_time_ratio(estimates, measured_times)
    return sorted(
        (apply_measured_time(one, measured_times, default_ratio=default_ratio) for one in estimates), key=sort_key
    )


def median_time_ratio(estimates: Sequence[Estimate], measured_times: Mapping[str, MeasuredTime]) -> float:
    """Return the median ratio of measured to forecast seconds, 1 if nothing was timed."""
    ratios = [
        measured_times[key].seconds / one.step_seconds
        for one in estimates
        if (key := str(one.candidate)) in measured_times
    ]
    return median(ratios) if ratios else 1.0


def apply_measured_time(
    estimate: Estimate, measured_times: Mapping[str, MeasuredTime], *, default_ratio: float
) -> Estimate:
    """Return the estimate with its measured seconds or, if it was not timed, with its forecast × `default_ratio`."""
    measured_time = measured_times.get(str(estimate.candidate))
    ratio = default_ratio if measured_time is None else measured_time.seconds / estimate.step_seconds
    return replace(estimate, seconds=estimate.seconds.scaled_by(ratio), measured_time=measured_time)
