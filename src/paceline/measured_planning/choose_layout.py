"""Choice of the recommended layout: the fastest one that fits in a replay."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import LayoutError
from paceline.launch.failures.oom_detection import freeze_existing_objects
from paceline.measured_planning.finalist_replay import CandidateChecker, CheckedCandidate, row_seen
from paceline.planner.advice.named_layouts import NamedLayouts, evaluate_named_layouts
from paceline.planner.advice.recommendations import Advice, PlanRow, advise, build_advice
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import MICRO_BATCH_KEY, MODEL_AXES, Candidate
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.search_space import FAMILY, SearchSpace, has_refused_option, is_layout_refused, option_keys
from paceline.planner.search.shortlist import RejectedLayout, apply_measured_time, median_time_ratio

_SEEN = 3  # the profiler has tried microbatches up to this size
_SHORTLIST = 3  # layouts of a family that do not fit before the family is dropped; two equal refusals drop it too
_MOST_REFUSED = 12  # after these, and after the time limit, the next one is recommended by its forecast


@dataclass(frozen=True, kw_only=True)
class ChosenLayout:
    """The chosen layout. `replays` has the replayed candidates, and the chosen one unless `advice.unreplayed`."""

    forecast: CostModel
    advice: Advice
    seen: Mapping[str, CheckedCandidate]

    @property
    def best(self) -> CheckedCandidate | None:
        """The replay of the recommended layout."""
        return self.seen.get(str(self.advice.recommended.candidate))


@freeze_existing_objects()
def decide(
    rehearsal: CandidateChecker,
    forecast: CostModel,
    *,
    grid: SearchSpace,
    until: float,
    options: Sequence[Estimate] = (),
    lost: Mapping[Candidate, RejectedLayout] | None = None,
    others: bool = False,
) -> ChosenLayout:
    """Return the best of `options`, or of the whole grid if none is left; `rejected` are known to be refused.

    The recommended layout is replayed even after the `deadline`. Only if a dozen before it were refused, it is
    recommended by its forecast, and the advice says so. With `replay_others` the best of the other families are
    replayed too, as many as time allows. The next layout of its family replaces a refused one.

    Raises:
        LayoutError: nothing fits.
    """
    known = _Known(rehearsal, forecast, grid, options)
    for candidate, own in sorted((lost or {}).items(), key=lambda one: _has_model_axes(one[0])):
        if _is_left(candidate, known.forecast):  # an earlier refusal may have removed it
            known.lose(candidate, own)
    case = None
    while True:
        advice = known.advice()
        case = case or advice.case
        row = _next(advice, known, until=until, others=others)
        if row is None:
            break
        known.replay(row.estimate)
    first = str(advice.recommended.candidate)
    late = f"{known.num_refused} better ones were refused in replay, and the time limit was reached"
    advice = replace(advice, case=case, not_replayed_reason="" if first in known.seen else late)
    return ChosenLayout(forecast=known.forecast, advice=advice, seen=known.seen)


def decide_named(
    rehearsal: CandidateChecker, forecast: CostModel, layouts: Sequence[str], *, until: float,
    micro_batch_size: int | None = None, options: Sequence[Estimate] = (),
) -> tuple[NamedLayouts, dict[str, CheckedCandidate]]:  # fmt: skip
    """Return the named layouts in their order; the fastest that fits is replayed, and others as time allows.

    Without a requested `micro_batch_size`, a smaller one is tried if a layout does not fit.
    """
    known, most = _Known(rehearsal, forecast, SearchSpace(), ()), dict[str, int]()
    while True:
        found = evaluate_named_layouts(
            known.forecast,
            layouts,
            micro_batch_size=micro_batch_size,
            timed_estimates=options,
            max_micro_batch_sizes=most,
        )
        rows = [row_seen(row, known.seen, forecast.cluster.device) for row in found.rows]
        shown = replace(found, rows=tuple(rows), not_replayed_reason="")
        wanted = [
            *([] if shown.recommended_row is None else [shown.recommended_row]),
            *(row for row in rows if known.has_time(row, until)),
        ]
        row = next((one for one in wanted if str(one.estimate.candidate) not in known.seen), None)
        if row is None:
            return shown, known.seen
        known.rehearse(row.estimate)
        size, is_short = row.estimate.candidate.micro_batch_size, not known.seen[str(row.estimate.candidate)].error
        is_short = is_short and not row_seen(row, known.seen, forecast.cluster.device).fits
        if micro_batch_size is None and is_short and size > 1:
            most[found.names[rows.index(row)]] = size - 1


def _next(advice: Advice, known: "_Known", *, until: float, others: bool) -> PlanRow | None:
    """Return the next row to replay: the recommended one, then the others while there is time."""
    first, *rest = advice.rows
    if str(first.estimate.candidate) not in known.seen:
        is_late = known.num_refused >= _MOST_REFUSED and time.monotonic() > until
        return None if is_late else first
    return next((row for row in rest if others and known.has_time(row, until)), None)


class _Known:
    """The candidates that remain, and the replays and refusals so far."""

    def __init__(
        self, rehearsal: CandidateChecker, forecast: CostModel, grid: SearchSpace, options: Sequence[Estimate]
    ) -> None:
        self.forecast = forecast
        self.seen: dict[str, CheckedCandidate] = {}
        self.num_refused = 0
        self._rehearsal = rehearsal
        self._grid = grid
        self._options = list(options)
        self._families = {one.candidate.family for one in options}
        self._misfits = Counter[str]()
        self._reasons: dict[str, list[str]] = {}

    def advice(self) -> Advice:
        """Return the advice for the candidates that remain."""
        options = self._left()
        if options:
            return build_advice(self.forecast, options, grid=self._grid)
        return advise(self.forecast, grid=self._grid)

    def has_time(self, row: PlanRow, until: float) -> bool:
        """Return whether a row should be replayed and would finish in time, judged by the earlier replays."""
        candidate = row.estimate.candidate
        if str(candidate) in self.seen or not row.fits or self._misfits[candidate.family] >= _SHORTLIST:
            return False
        each = max((one.seconds / max(1, one.work) for one in self.seen.values()), default=0.0)
        work = self._rehearsal.work(candidate, row.estimate.stages, self.forecast)
        return each * work < until - time.monotonic()

    def rehearse(self, estimate: Estimate) -> CheckedCandidate:
        """Replay a candidate; if the job's code refuses it, record whether its microbatch size is the cause."""
        found = self.seen[str(estimate.candidate)] = self._rehearsal.replayed(estimate, self.forecast)
        if found.error and found.is_jobs:
            self._learn(self._alone_refused(estimate.candidate))
        return found

    def replay(self, estimate: Estimate) -> None:
        """Replay a candidate; remove it if it is refused or may not fit."""
        found, candidate = self.rehearse(estimate), estimate.candidate
        if found.error:
            self.num_refused += 1
            self.refuse(candidate, found.error)
            return
        row = row_seen(PlanRow(family=candidate.family, estimate=estimate), self.seen, self.forecast.cluster.device)
        if not row.fits:
            self.num_refused += 1
            self._misfits[candidate.family] += 1
            reckoned = self.forecast.estimate(candidate)
            times = found.peak_bytes / (reckoned.peak_bytes - reckoned.memory.reserve)
            self.forecast = self.forecast.with_memory_ratio(candidate.family, max(1.0, times))
            self._options = [one for one in self._options if one.candidate != candidate]

    def lose(self, candidate: Candidate, why: RejectedLayout) -> None:
        """Remove a candidate that was refused during timing."""
        self._families.add(candidate.family)
        if why.is_job_error and not _has_model_axes(candidate):  # a replica runs the same code as one process
            self._learn({_micro(candidate): why.reason})
        elif why.is_job_error and (sizes := self._alone_refused(candidate)):
            self._learn(sizes)
        else:
            self.refuse(candidate, why.reason)

    def refuse(self, candidate: Candidate, error: str) -> None:
        """Remove the cause of a refusal: the microbatch size, a part of the layout, or the candidate itself."""
        if not _is_left(candidate, self.forecast):
            return
        parts = dict(_parts(candidate))
        if not parts:
            raise LayoutError(error, hint="--layout single shows the full error")
        axes = {word: one for word, one in parts.items() if word.partition("=")[0] in MODEL_AXES}
        if len(axes) == 1 and self._rehearsal.is_of_parts(candidate, error):
            refused = dict.fromkeys(axes, error)  # refused in every layout that has this axis
        else:
            refused = self._refused_alone(axes, parts) or self._refused_alone(parts, parts)
        for word, why in refused.items():
            self._learn({word: why})
            self._count(word.partition("=")[0], why)
        if not refused:
            self._learn({str(candidate): error})
            self._count(next(iter(parts)) if len(parts) == 1 else f"{FAMILY}={candidate.family}", error)

    def _refused_alone(self, wanted: Mapping[str, Candidate], parts: Mapping[str, Candidate]) -> dict[str, str]:
        """Return the parts of a layout that are refused without the other parts, with reasons."""
        if len(parts) == 1:
            return {}
        why = {word: self._rehearsal.refusal(one, self.forecast) for word, one in wanted.items()}
        return {word: said for word, said in why.items() if said}

    def _count(self, word: str, error: str) -> None:
        """Remove a part of layouts after two refusals with the same reason, or three with any.

        An axis is removed after its sizes, and a family after its layouts.
        """
        reasons = self._reasons.setdefault(word, [])
        reasons.append(re.sub(r"\d+", "", error))
        if len(reasons) < _SHORTLIST and reasons.count(reasons[-1]) < 2:
            return
        self._learn({word: error})
        axis, _, size = word.partition("=")
        if axis in MODEL_AXES and size:
            self._count(axis, error)

    def _alone_refused(self, candidate: Candidate) -> dict[str, str]:
        """Return the microbatch size if the job's code refuses it in one process too; small sizes were profiled."""
        if candidate.micro_batch_size <= _SEEN:
            return {}
        plain = Candidate(micro_batch_size=candidate.micro_batch_size, precision=candidate.precision)
        why = self._rehearsal.refusal(plain, self.forecast)
        return {_micro(candidate): why} if why else {}

    def _learn(self, refused: Mapping[str, str]) -> None:
        facts = self.forecast.profile
        if refused:
            self.forecast = self.forecast.with_profile(replace(facts, refused={**facts.refused, **refused}))

    def _is_left(self, candidate: Candidate) -> bool:
        fits = str(candidate) in self.seen or self.forecast.estimate(candidate).fits
        return fits and _is_left(candidate, self.forecast)

    def _left(self) -> list[Estimate]:
        """Return the options that were not refused, and the next candidate of each family that has none left."""
        left = [one for one in self._options if self._is_left(one.candidate)]
        if not left:
            return []
        if gone := self._families - {one.candidate.family for one in left}:
            timed = {str(one.candidate): one.measured_time for one in self._options if one.measured_time is not None}
            plain = [self.forecast.estimate(one.candidate) for one in self._options if one.measured_time is not None]
            usual, best = median_time_ratio(plain, timed), search(self.forecast, grid=self._grid).best
            left += [
                apply_measured_time(best[family], {}, default_ratio=usual) for family in sorted(gone) if family in best
            ]
        return left


def _is_left(candidate: Candidate, forecast: CostModel) -> bool:
    facts = forecast.profile
    return not (
        has_refused_option(candidate, facts)
        or is_layout_refused(candidate, facts)
        or _micro(candidate) in facts.refused
    )


def _has_model_axes(candidate: Candidate) -> bool:
    return any(axis in option_keys(candidate) for axis in MODEL_AXES)


def _micro(candidate: Candidate) -> str:
    return f"{MICRO_BATCH_KEY}={candidate.micro_batch_size}"


def _parts(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
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
