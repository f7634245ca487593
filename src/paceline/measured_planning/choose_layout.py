"""Choose the recommended layout: the fastest one that fits in a replay."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import LayoutError
from paceline.launch.failures.oom_detection import freeze_existing_objects
from paceline.measured_planning.finalist_replay import CandidateChecker, CheckedCandidate, apply_replay
from paceline.planner.advice.named_layouts import NamedLayouts, evaluate_named_layouts
from paceline.planner.advice.recommendations import Advice, PlanRow, advise, build_advice
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import MICRO_BATCH_KEY, MODEL_AXES, Candidate
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.search_space import FAMILY, SearchSpace, has_refused_option, is_layout_refused, option_keys
from paceline.planner.search.shortlist import RejectedLayout, apply_measured_time, median_time_ratio

_PROFILED_SAMPLES = 3  # the profile has run microbatches up to this size
_MAX_MISFITS = 3  # layouts of a family that do not fit before the family is dropped; two equal refusals drop it too
_MAX_REFUSALS = 12  # after so many, and after the time limit, the next layout is recommended by its forecast


@dataclass(frozen=True, kw_only=True)
class ChosenLayout:
    """The chosen layout. If it was not replayed, `replays` lacks it, and `advice.not_replayed_reason` says why."""

    forecast: CostModel
    advice: Advice
    replays: Mapping[str, CheckedCandidate]

    @property
    def best(self) -> CheckedCandidate | None:
        """The replay of the recommended layout."""
        return self.replays.get(str(self.advice.recommended.candidate))


@freeze_existing_objects()
def choose_layout(
    checker: CandidateChecker,
    forecast: CostModel,
    *,
    grid: SearchSpace,
    deadline: float,
    options: Sequence[Estimate] = (),
    rejected: Mapping[Candidate, RejectedLayout] | None = None,
    replay_others: bool = False,
) -> ChosenLayout:
    """Return the best of `options`, or of the whole grid if no option is left; `rejected` layouts are not considered.

    The recommended layout is replayed even after the `deadline`. But if a dozen others were refused by then, it is
    recommended by its forecast, and the advice says so. With `replay_others` the best layouts of the other families
    are replayed too, as many as time allows. A refused layout is replaced by the next one of its family.

    Raises:
        LayoutError: nothing fits.
    """
    selection = _Selection(checker, forecast, grid, options)
    for candidate, rejection in sorted((rejected or {}).items(), key=lambda item: _has_model_axes(item[0])):
        if _is_allowed(candidate, selection.forecast):  # an earlier refusal may have removed it
            selection.remove_rejected(candidate, rejection)
    case = None
    while True:
        advice = selection.make_advice()
        case = case or advice.case
        row = _next_row(advice, selection, deadline=deadline, replay_others=replay_others)
        if row is None:
            break
        selection.replay_or_remove(row.estimate)
    best_name = str(advice.recommended.candidate)
    unreplayed_reason = f"{selection.num_refused} better layouts were refused in replay, and the time limit was reached"
    advice = replace(advice, case=case, not_replayed_reason="" if best_name in selection.replays else unreplayed_reason)
    return ChosenLayout(forecast=selection.forecast, advice=advice, replays=selection.replays)


def choose_named_layouts(
    checker: CandidateChecker, forecast: CostModel, layouts: Sequence[str], *, deadline: float,
    micro_batch_size: int | None = None, options: Sequence[Estimate] = (),
) -> tuple[NamedLayouts, dict[str, CheckedCandidate]]:  # fmt: skip
    """Return the named layouts in their order; the fastest that fits is replayed, and others as time allows.

    Without a requested `micro_batch_size`, a smaller one is tried if a layout does not fit.
    """
    selection, max_micro_batch_sizes = _Selection(checker, forecast, SearchSpace(), ()), dict[str, int]()
    while True:
        named_layouts = evaluate_named_layouts(
            selection.forecast,
            layouts,
            micro_batch_size=micro_batch_size,
            timed_estimates=options,
            max_micro_batch_sizes=max_micro_batch_sizes,
        )
        rows = [apply_replay(row, selection.replays, forecast.cluster.device) for row in named_layouts.rows]
        replayed_layouts = replace(named_layouts, rows=tuple(rows), not_replayed_reason="")
        pending = [
            *([] if replayed_layouts.recommended_row is None else [replayed_layouts.recommended_row]),
            *(row for row in rows if selection.has_time(row, deadline)),
        ]
        row = next((row for row in pending if str(row.estimate.candidate) not in selection.replays), None)
        if row is None:
            return replayed_layouts, selection.replays
        selection.run_replay(row.estimate)
        size, is_too_large = (
            row.estimate.candidate.micro_batch_size,
            not selection.replays[str(row.estimate.candidate)].error,
        )
        is_too_large = is_too_large and not apply_replay(row, selection.replays, forecast.cluster.device).fits
        if micro_batch_size is None and is_too_large and size > 1:
            max_micro_batch_sizes[named_layouts.names[rows.index(row)]] = size - 1


def _next_row(advice: Advice, selection: "_Selection", *, deadline: float, replay_others: bool) -> PlanRow | None:
    """Return the next row to replay: the recommended one, then the others while there is time."""
    first, *other_rows = advice.rows
    if str(first.estimate.candidate) not in selection.replays:
        is_time_over = selection.num_refused >= _MAX_REFUSALS and time.monotonic() > deadline
        return None if is_time_over else first
    return next((row for row in other_rows if replay_others and selection.has_time(row, deadline)), None)


class _Selection:
    """The candidates that remain, and the replays and refusals so far."""

    def __init__(
        self, checker: CandidateChecker, forecast: CostModel, grid: SearchSpace, options: Sequence[Estimate]
    ) -> None:
        self.forecast = forecast
        self.replays: dict[str, CheckedCandidate] = {}
        self.num_refused = 0
        self._checker = checker
        self._grid = grid
        self._options = list(options)
        self._families = {estimate.candidate.family for estimate in options}
        self._misfits = Counter[str]()
        self._reasons: dict[str, list[str]] = {}

    def make_advice(self) -> Advice:
        """Return the advice for the candidates that remain."""
        options = self._available_options()
        if options:
            return build_advice(self.forecast, options, grid=self._grid)
        return advise(self.forecast, grid=self._grid)

    def has_time(self, row: PlanRow, deadline: float) -> bool:
        """Return whether a row should be replayed and would finish in time, judged by the earlier replays."""
        candidate = row.estimate.candidate
        if str(candidate) in self.replays or not row.fits or self._misfits[candidate.family] >= _MAX_MISFITS:
            return False
        seconds_per_block = max((done.seconds / max(1, done.work) for done in self.replays.values()), default=0.0)
        work = self._checker.work(candidate, row.estimate.stages, self.forecast)
        return seconds_per_block * work < deadline - time.monotonic()

    def run_replay(self, estimate: Estimate) -> CheckedCandidate:
        """Replay a candidate; if the job's code refuses it, record whether its microbatch size is the cause."""
        replay = self.replays[str(estimate.candidate)] = self._checker.replay(estimate, self.forecast)
        if replay.error and replay.is_job_error:
            self._add_refused(self._refused_micro_batch_size(estimate.candidate))
        return replay

    def replay_or_remove(self, estimate: Estimate) -> None:
        """Replay a candidate; remove it if it is refused or may not fit."""
        result, candidate = self.run_replay(estimate), estimate.candidate
        if result.error:
            self.num_refused += 1
            self.remove_refused(candidate, result.error)
            return
        row = apply_replay(
            PlanRow(family=candidate.family, estimate=estimate), self.replays, self.forecast.cluster.device
        )
        if not row.fits:
            self.num_refused += 1
            self._misfits[candidate.family] += 1
            forecast_estimate = self.forecast.estimate(candidate)
            ratio = result.peak_bytes / (forecast_estimate.peak_bytes - forecast_estimate.memory.reserve)
            self.forecast = self.forecast.with_memory_ratio(candidate.family, max(1.0, ratio))
            self._options = [estimate for estimate in self._options if estimate.candidate != candidate]

    def remove_rejected(self, candidate: Candidate, rejection: RejectedLayout) -> None:
        """Remove a candidate that was refused during timing."""
        self._families.add(candidate.family)
        if rejection.is_job_error and not _has_model_axes(candidate):  # a replica runs the same code as one process
            self._add_refused({_micro_batch_part(candidate): rejection.reason})
        elif rejection.is_job_error and (sizes := self._refused_micro_batch_size(candidate)):
            self._add_refused(sizes)
        else:
            self.remove_refused(candidate, rejection.reason)

    def remove_refused(self, candidate: Candidate, error: str) -> None:
        """Remove the cause of a refusal: the microbatch size, a part of the layout, or the candidate itself."""
        if not _is_allowed(candidate, self.forecast):
            return
        parts = dict(_single_part_candidates(candidate))
        if not parts:
            raise LayoutError(error, hint="--layout single shows the full error")
        axes = {part: single_part for part, single_part in parts.items() if part.partition("=")[0] in MODEL_AXES}
        if len(axes) == 1 and self._checker.is_split_error(candidate, error):
            refused = dict.fromkeys(axes, error)  # refused in every layout that has this axis
        else:
            refused = self._refused_parts(axes, parts) or self._refused_parts(parts, parts)
        for part, reason in refused.items():
            self._add_refused({part: reason})
            self._count_refusal(part.partition("=")[0], reason)
        if not refused:
            self._add_refused({str(candidate): error})
            self._count_refusal(next(iter(parts)) if len(parts) == 1 else f"{FAMILY}={candidate.family}", error)

    def _refused_parts(self, tested: Mapping[str, Candidate], parts: Mapping[str, Candidate]) -> dict[str, str]:
        """Return the `tested` parts of a layout that are refused even without the other parts, with reasons."""
        if len(parts) == 1:
            return {}
        reasons = {part: self._checker.refusal_reason(candidate, self.forecast) for part, candidate in tested.items()}
        return {part: reason for part, reason in reasons.items() if reason}

    def _count_refusal(self, part: str, error: str) -> None:
        """Remove a part of layouts after two refusals with the same reason, or three with any.

        An axis is removed after refusals of its sizes, and a family after refusals of its layouts.
        """
        reasons = self._reasons.setdefault(part, [])
        reasons.append(re.sub(r"\d+", "", error))
        if len(reasons) < _MAX_MISFITS and reasons.count(reasons[-1]) < 2:
            return
        self._add_refused({part: error})
        axis, _, size = part.partition("=")
        if axis in MODEL_AXES and size:
            self._count_refusal(axis, error)

    def _refused_micro_batch_size(self, candidate: Candidate) -> dict[str, str]:
        """Return the microbatch size if the job's code refuses it in one process too; small sizes were profiled."""
        if candidate.micro_batch_size <= _PROFILED_SAMPLES:
            return {}
        plain = Candidate(micro_batch_size=candidate.micro_batch_size, precision=candidate.precision)
        reason = self._checker.refusal_reason(plain, self.forecast)
        return {_micro_batch_part(candidate): reason} if reason else {}

    def _add_refused(self, refused: Mapping[str, str]) -> None:
        profile = self.forecast.profile
        if refused:
            self.forecast = self.forecast.with_profile(replace(profile, refused={**profile.refused, **refused}))

    def _is_available(self, candidate: Candidate) -> bool:
        fits = str(candidate) in self.replays or self.forecast.estimate(candidate).fits
        return fits and _is_allowed(candidate, self.forecast)

    def _available_options(self) -> list[Estimate]:
        """Return the options that were not refused, and the next candidate of each family that has none left."""
        available = [estimate for estimate in self._options if self._is_available(estimate.candidate)]
        if not available:
            return []
        if lost_families := self._families - {estimate.candidate.family for estimate in available}:
            timed = {str(e.candidate): e.measured_time for e in self._options if e.measured_time is not None}
            forecasts = [self.forecast.estimate(e.candidate) for e in self._options if e.measured_time is not None]
            typical_ratio, best = median_time_ratio(forecasts, timed), search(self.forecast, grid=self._grid).best
            available += [
                apply_measured_time(best[family], {}, default_ratio=typical_ratio)
                for family in sorted(lost_families)
                if family in best
            ]
        return available


def _is_allowed(candidate: Candidate, forecast: CostModel) -> bool:
    profile = forecast.profile
    return not (
        has_refused_option(candidate, profile)
        or is_layout_refused(candidate, profile)
        or _micro_batch_part(candidate) in profile.refused
    )


def _has_model_axes(candidate: Candidate) -> bool:
    return any(axis in option_keys(candidate) for axis in MODEL_AXES)


def _micro_batch_part(candidate: Candidate) -> str:
    return f"{MICRO_BATCH_KEY}={candidate.micro_batch_size}"


def _single_part_candidates(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield the name of each axis and option, with a candidate that has only this part and its requirements."""
    c = candidate
    plain = Candidate(micro_batch_size=c.micro_batch_size, precision=c.precision)
    for axis in MODEL_AXES:
        size = getattr(c, axis)
        if size > 1:  # experts are spread over replicas
            yield f"{axis}={size}", replace(plain, **{axis: size}, **({"dp_replicate": size} if axis == "ep" else {}))
    shards = replace(plain, dp_shard=c.dp_shard, zero=c.zero, params=c.params)
    if c.dp_shard > 1:
        yield f"zero={c.zero}", shards
    if c.remat != "none":
        yield f"remat={c.remat}", replace(plain, remat=c.remat)
    if c.sequence:
        yield "sequence", replace(plain, tp=c.tp, sequence=True)
    if c.pp > 1 and c.schedule != "1f1b":
        yield f"schedule={c.schedule}", replace(plain, pp=c.pp, schedule=c.schedule, virtual=c.virtual)
    if c.offload:
        yield "offload", replace(shards, offload=c.offload)
    if c.dp_replicate > 1 and c.ranks == c.dp_replicate and c.ep == 1 and c.remat == "none":
        yield f"{FAMILY}={c.family}", replace(plain, dp_replicate=c.dp_replicate)
