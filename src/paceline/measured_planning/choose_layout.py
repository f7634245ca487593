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

_PROFILED_SAMPLES = 3  # the profile traced microbatches up to this size
_MAX_MISFITS = 3  # if so many layouts of a family do not fit, no more of its layouts are replayed for comparison
_MAX_REASONS = 3  # after so many refusals with a part, all layouts with this part are removed
_MAX_REFUSALS = 12  # after so many and after the time limit, the next layout is recommended without a replay


@dataclass(frozen=True, kw_only=True)
class ChosenLayout:
    """The advice with the chosen layout, and all replays by candidate.

    If the chosen layout was not replayed, `advice.not_replayed_reason` says why. `forecast` is corrected by the
    replays.
    """

    forecast: CostModel
    advice: Advice
    replays: Mapping[str, CheckedCandidate]

    @property
    def best(self) -> CheckedCandidate | None:
        """The replay of the recommended layout; None if it was not replayed."""
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
    """Return the best of `options`, or of the whole grid if no option is left, without the `rejected` layouts.

    The recommended layout is replayed even after the `deadline`. If the replay refuses it, or it does not fit, the next
    best layout is recommended instead. After the deadline and a dozen such replays, the next layout is recommended
    without a replay, and the advice says so. With `replay_others`, the best layouts of other families are replayed too,
    as many as time allows.

    Raises:
        LayoutError: nothing fits.
    """
    selection = _Selection(checker, forecast, grid, options)
    for candidate, rejection in sorted((rejected or {}).items(), key=lambda item: _has_model_axes(item[0])):
        if _is_allowed(candidate, selection.forecast):  # an earlier refusal may have removed it
            selection.remove_after_timing(candidate, rejection)
    memory_case = None  # what fits on one device, as the first advice says, before refusals change the forecast
    while True:
        advice = selection.make_advice()
        memory_case = memory_case or advice.case
        row = _next_row(advice, selection, deadline=deadline, replay_others=replay_others)
        if row is None:
            break
        selection.replay_or_remove(row.estimate)
    best_name = str(advice.recommended.candidate)
    unreplayed_reason = (
        f"{selection.num_refused} better layouts were refused or did not fit in replay, and the time limit was reached"
    )
    advice = replace(
        advice, case=memory_case, not_replayed_reason="" if best_name in selection.replays else unreplayed_reason
    )
    return ChosenLayout(forecast=selection.forecast, advice=advice, replays=selection.replays)


def choose_named_layouts(
    checker: CandidateChecker, forecast: CostModel, layouts: Sequence[str], *, deadline: float,
    micro_batch_size: int | None = None, options: Sequence[Estimate] = (),
) -> tuple[NamedLayouts, dict[str, CheckedCandidate]]:  # fmt: skip
    """Return the named layouts in the order of `layouts`, and the replays by candidate.

    The fastest layout that fits is replayed, and others as time allows. Without a requested `micro_batch_size`, smaller
    sizes are tried for a layout that does not fit.
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
            *(row for row in rows if selection.should_replay(row, deadline)),
        ]
        row = next((row for row in pending if str(row.estimate.candidate) not in selection.replays), None)
        if row is None:
            return replayed_layouts, selection.replays
        replay, size = selection.run_replay(row.estimate), row.estimate.candidate.micro_batch_size
        is_too_large = not replay.error and not apply_replay(row, selection.replays, forecast.cluster.device).fits
        if micro_batch_size is None and is_too_large and size > 1:
            max_micro_batch_sizes[named_layouts.names[rows.index(row)]] = size - 1


def _next_row(advice: Advice, selection: "_Selection", *, deadline: float, replay_others: bool) -> PlanRow | None:
    """Return the next row to replay: the recommended one, then others while time allows. Return None at the end."""
    first, *other_rows = advice.rows
    if str(first.estimate.candidate) not in selection.replays:
        is_time_over = selection.num_refused >= _MAX_REFUSALS and time.monotonic() > deadline
        return None if is_time_over else first
    return next((row for row in other_rows if replay_others and selection.should_replay(row, deadline)), None)


class _Selection:
    """The candidates that may still be chosen, the replays so far, and the refusals so far.

    Refusals are stored in the profile of `forecast`, by part of a layout. A part is an axis (`tp`), an axis with its
    size (`tp=4`), a setting of the layout (`remat`), a setting with its value (`remat=full`), a microbatch size, a
    family, or a whole candidate. Every layout with a refused part is removed.
    """

    def __init__(
        self, checker: CandidateChecker, forecast: CostModel, grid: SearchSpace, options: Sequence[Estimate]
    ) -> None:
        self.forecast = forecast
        self.replays: dict[str, CheckedCandidate] = {}
        self.num_refused = 0  # candidates whose replay was refused or did not fit
        self._checker = checker
        self._grid = grid
        self._options = list(options)
        self._families = {estimate.candidate.family for estimate in options}  # also of rejected layouts
        self._misfits = Counter[str]()  # candidates that did not fit, by family
        self._reasons: dict[str, list[str]] = {}  # of refusals, by part

    def make_advice(self) -> Advice:
        """Return the advice for the candidates that may still be chosen."""
        options = self._available_options()
        if options:
            return build_advice(self.forecast, options, grid=self._grid)
        return advise(self.forecast, grid=self._grid)

    def should_replay(self, row: PlanRow, deadline: float) -> bool:
        """Return whether a row may fit, is not replayed yet, and would finish in time, as earlier replays suggest."""
        candidate = row.estimate.candidate
        if str(candidate) in self.replays or not row.fits or self._misfits[candidate.family] >= _MAX_MISFITS:
            return False
        seconds_per_block = max(
            (replay.seconds / max(1, replay.num_blocks) for replay in self.replays.values()), default=0.0
        )
        num_blocks = self._checker.count_replayed_blocks(candidate, row.estimate.stages, self.forecast)
        return seconds_per_block * num_blocks < deadline - time.monotonic()

    def run_replay(self, estimate: Estimate) -> CheckedCandidate:
        """Replay a candidate. If the job's code fails because of its microbatch size, record this size as refused."""
        replay = self.replays[str(estimate.candidate)] = self._checker.replay(estimate, self.forecast)
        if replay.error and replay.is_job_error:
            self._add_refused(self._refused_micro_batch_size(estimate.candidate))
        return replay

    def replay_or_remove(self, estimate: Estimate) -> None:
        """Replay a candidate. Remove it if it is refused or may not fit."""
        result, candidate = self.run_replay(estimate), estimate.candidate
        if result.error:
            self.num_refused += 1
            self.remove_refused_part(candidate, result.error)
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

    def remove_after_timing(self, candidate: Candidate, rejection: RejectedLayout) -> None:
        """Remove a candidate that was refused during timing, or all candidates with the cause of the refusal."""
        self._families.add(candidate.family)
        if rejection.is_job_error and not _has_model_axes(candidate):  # its replicas run the same code as one process
            self._add_refused({_micro_batch_part(candidate): rejection.reason})
        elif rejection.is_job_error and (sizes := self._refused_micro_batch_size(candidate)):
            self._add_refused(sizes)
        else:
            self.remove_refused_part(candidate, rejection.reason)

    def remove_refused_part(self, candidate: Candidate, error: str) -> None:
        """Remove all candidates with the part that causes a refusal, or only this candidate if no single part does."""
        if not _is_allowed(candidate, self.forecast):
            return
        parts = dict(_single_part_candidates(candidate))
        if not parts:
            raise LayoutError(error, hint="--layout single shows the full error")
        axes = {part: single_part for part, single_part in parts.items() if part.partition("=")[0] in MODEL_AXES}
        if len(axes) == 1 and self._checker.is_split_error(candidate, error):
            refused = dict.fromkeys(axes, error)  # the split of the model is wrong in every layout with this axis
        else:
            refused = self._refused_parts(axes, parts) or self._refused_parts(parts, parts)
        for part, reason in refused.items():
            self._add_refused({part: reason})
            self._count_refusal(part.partition("=")[0], reason)
        if not refused:
            self._add_refused({str(candidate): error})
            self._count_refusal(next(iter(parts)) if len(parts) == 1 else f"{FAMILY}={candidate.family}", error)

    def _refused_parts(self, tested: Mapping[str, Candidate], parts: Mapping[str, Candidate]) -> dict[str, str]:
        """Return the `tested` parts of a layout that are refused even without its other parts, with reasons.

        `tested` and `parts` map the name of a part to a candidate with only this part.
        """
        if len(parts) == 1:
            return {}
        reasons = {part: self._checker.refusal_reason(candidate, self.forecast) for part, candidate in tested.items()}
        return {part: reason for part, reason in reasons.items() if reason}

    def _count_refusal(self, part: str, error: str) -> None:
        """Count a refusal of a part. Remove the part after two refusals with equal reasons, or three with any reasons.

        Refusals of sizes count for their axis. Refusals of a candidate count for its only part, or for its family if it
        has several parts.
        """
        reasons = self._reasons.setdefault(part, [])
        reasons.append(re.sub(r"\d+", "", error))
        if len(reasons) < _MAX_REASONS and reasons.count(reasons[-1]) < 2:
            return
        self._add_refused({part: error})
        axis, _, size = part.partition("=")
        if axis in MODEL_AXES and size:
            self._count_refusal(axis, error)

    def _refused_micro_batch_size(self, candidate: Candidate) -> dict[str, str]:
        """Return the microbatch size with the reason if it is refused in one process too, else an empty dictionary.

        The profile has traced small sizes, so they are not refused.
        """
        if candidate.micro_batch_size <= _PROFILED_SAMPLES:
            return {}
        plain = Candidate(micro_batch_size=candidate.micro_batch_size, precision=candidate.precision)
        reason = self._checker.refusal_reason(plain, self.forecast)
        return {_micro_batch_part(candidate): reason} if reason else {}

    def _add_refused(self, refused: Mapping[str, str]) -> None:
        """Remove all candidates with these parts. `refused` has the reason for each part."""
        profile = self.forecast.profile
        if refused:
            self.forecast = self.forecast.with_profile(replace(profile, refused={**profile.refused, **refused}))

    def _is_available(self, candidate: Candidate) -> bool:
        """Return whether the candidate is allowed and fits, by its replay or else by the forecast."""
        fits = str(candidate) in self.replays or self.forecast.estimate(candidate).fits
        return fits and _is_allowed(candidate, self.forecast)

    def _available_options(self) -> list[Estimate]:
        """Return the options that are not removed, and the best candidate of each family whose options are all removed.

        Return an empty list if all options are removed.
        """
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
    """Return whether no part of the candidate is refused."""
    profile = forecast.profile
    return not (
        has_refused_option(candidate, profile)
        or is_layout_refused(candidate, profile)
        or _micro_batch_part(candidate) in profile.refused
    )


def _has_model_axes(candidate: Candidate) -> bool:
    """Return whether the candidate divides the model or its computation, instead of only the batch."""
    return any(axis in option_keys(candidate) for axis in MODEL_AXES)


def _micro_batch_part(candidate: Candidate) -> str:
    return f"{MICRO_BATCH_KEY}={candidate.micro_batch_size}"


def _single_part_candidates(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield the name of each axis and option of a candidate, with a candidate that has only this part.

    If a part needs another part, the yielded candidate has both.
    """
    c = candidate
    plain = Candidate(micro_batch_size=c.micro_batch_size, precision=c.precision)
    for axis in MODEL_AXES:
        size = getattr(c, axis)
        if size > 1:  # ep needs replicas, over which it spreads the experts
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
