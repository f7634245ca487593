"""Choose the candidates of a plan to time on the target cluster, and put the measured seconds into their estimates."""

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
_MAX_CANDIDATES = 20_000  # only this many candidates of the search space are estimated
_MIN_SECONDS = 1e-6  # no step is as fast as this
# the tuples among the fields of `MeasuredTime`, which JSON stores as lists; `between`: the timing's start and end
_TUPLE_FIELDS = ("blocks", "between")


@dataclass(frozen=True, kw_only=True)
class TimingTrial:
    """A layout to time, with its settings and its forecast."""

    candidate: str
    """The name of the candidate, under which the measured time is reported."""
    layout: str
    """The value to type after `--layout`."""
    micro_batch_size: int
    min_blocks: int
    """The smallest number of blocks of a model that can be timed in this layout."""
    peak_fraction: float
    """The peak memory as a fraction of the usable memory."""
    state_fraction: float = 0.0
    """The training state as a fraction of the usable memory."""
    seconds: float = 0.0
    """The forecast step time; 0 if there is none."""
    stages: str = ""
    """The value of `place.stages`: the number of blocks of each stage; empty if all stages have equally many blocks."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for the other ranks."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RejectedLayout:
    """The reason why a layout could not be timed."""

    reason: str
    is_job_error: bool = False
    """True if the job's code failed; False if Paceline refused the layout."""


def shortlist(
    cost_model: CostModel,
    *,
    grid: SearchSpace | None = None,
    max_trials: int = MAX_TRIALS,
    extra_candidates: Collection[str] = (),
) -> list[Estimate]:
    """Return the candidates to time, the fastest first.

    These are the fastest candidate of each family and, up to `max_trials` in total, others that are nearly as fast as
    the best one. The candidates named in `extra_candidates` are added. Only candidates that fit are returned, and none
    with remat that also fits without it.
    """
    grid = grid or SearchSpace()
    considered = islice(candidates(cost_model.profile, cost_model.cluster, grid), _MAX_CANDIDATES)
    fitting = sorted((estimate for estimate in map(cost_model.estimate, considered) if estimate.fits), key=sort_key)
    fitting_candidates = {estimate.candidate for estimate in fitting}
    fitting = [
        estimate
        for estimate in fitting
        if (plain := _without_remat(estimate.candidate)) == estimate.candidate or plain not in fitting_candidates
    ]
    families: dict[str, list[Estimate]] = {}
    for estimate in fitting:
        families.setdefault(estimate.candidate.family, []).append(estimate)
    chosen = [family_estimates[0] for family_estimates in families.values()]
    nearly_as_fast = [
        estimate for estimate in fitting if estimate.step_seconds <= _NEAR_RATIO * fitting[0].step_seconds
    ]
    for estimate in nearly_as_fast:
        family_estimates = families[estimate.candidate.family]
        if (
            len(chosen) < max_trials
            and estimate is not family_estimates[0]
            and _num_chosen_of_family(estimate, family_estimates, chosen) < _MAX_PER_FAMILY
        ):
            chosen.append(estimate)
    chosen += [
        estimate for estimate in fitting if str(estimate.candidate) in extra_candidates and estimate not in chosen
    ]
    return sorted(chosen, key=sort_key)


def timing_order(options: Sequence[Estimate]) -> list[Estimate]:
    """Return the candidates in the order in which to time them, because time may run out.

    First comes the best of each family that is nearly as fast as the fastest, then the rest.
    """
    ordered = sorted(options, key=sort_key)
    nearly_as_fast = [
        estimate for estimate in ordered if estimate.step_seconds <= _NEAR_RATIO * ordered[0].step_seconds
    ]
    best_of_family = {estimate.candidate.family: estimate for estimate in reversed(nearly_as_fast)}
    return sorted(ordered, key=lambda estimate: best_of_family.get(estimate.candidate.family) is not estimate)


def _without_remat(candidate: Candidate) -> Candidate:
    """Return the candidate without activation checkpointing, which is faster."""
    return replace(candidate, remat="none")


def _num_chosen_of_family(estimate: Estimate, family_estimates: Sequence[Estimate], chosen: Sequence[Estimate]) -> int:
    """Return how many candidates of the estimate's family are chosen already."""
    return sum(other in family_estimates for other in chosen if other.candidate.family == estimate.candidate.family)


def timing_trial(estimate: Estimate) -> TimingTrial:
    """Return the trial for an estimate. Each stage has at least two blocks, so that each block has a neighbour."""
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
    """Return the measured times by candidate, from their JSON.

    Raises:
        ValueError, KeyError, TypeError: the content is not valid.
    """
    measured_times = {
        name: MeasuredTime(**{**fields, **{key: tuple(fields[key]) for key in _TUPLE_FIELDS}})
        for name, fields in stored.items()
    }
    if not all(_MIN_SECONDS < t.seconds < inf and 0 <= t.spread < inf and t.steps > 0 for t in measured_times.values()):
        raise ValueError("a measured time has an impossible value")
    return measured_times


def apply_measured_times(estimates: Sequence[Estimate], measured_times: Mapping[str, MeasuredTime]) -> list[Estimate]:
    """Return the estimates with their measured seconds, the fastest first.

    Forecasts of layouts that were not timed are multiplied by the median time ratio of the timed ones.
    """
    default_ratio = median_time_ratio(estimates, measured_times)
    return sorted(
        (apply_measured_time(estimate, measured_times, default_ratio=default_ratio) for estimate in estimates),
        key=sort_key,
    )


def median_time_ratio(estimates: Sequence[Estimate], measured_times: Mapping[str, MeasuredTime]) -> float:
    """Return the median ratio of measured to forecast seconds; 1 if nothing was timed."""
    ratios = [
        measured_times[key].seconds / estimate.step_seconds
        for estimate in estimates
        if (key := str(estimate.candidate)) in measured_times
    ]
    return median(ratios) if ratios else 1.0


def apply_measured_time(
    estimate: Estimate, measured_times: Mapping[str, MeasuredTime], *, default_ratio: float
) -> Estimate:
    """Return the estimate with its measured seconds or, if it was not timed, `default_ratio` × its forecast."""
    measured_time = measured_times.get(str(estimate.candidate))
    ratio = default_ratio if measured_time is None else measured_time.seconds / estimate.step_seconds
    return replace(estimate, seconds=estimate.seconds.scaled_by(ratio), measured_time=measured_time)
