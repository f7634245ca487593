"""What is recommended has been replayed and fits: what is refused, or needs more than there is, gives way to others."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import LayoutError
from paceline.plan.advice import Advice, advice_of, advise
from paceline.plan.candidate import MICRO, MODEL_AXES, Candidate
from paceline.plan.estimate import Estimate
from paceline.plan.forecast import Forecast
from paceline.plan.grid import Grid, is_refused, words_of
from paceline.plan.timed import Refused
from paceline.survive.short import only_new
from paceline.train.rehearsed import Rehearsal, Seen

_LEAST = 0.02
_SEEN = 3  # samples of a microbatch, which learning has tried
_MORE_SECONDS = 30.0  # where what came before was refused


@dataclass(frozen=True, kw_only=True)
class Decided:
    """`seen` is what was replayed on the way, by candidate: the recommended one too, unless time was over before."""

    forecast: Forecast
    advice: Advice
    seen: Mapping[str, Seen]

    @property
    def best(self) -> Seen | None:
        """Of the recommended one."""
        return self.seen.get(str(self.advice.recommended.candidate))


@only_new()
def decide(
    rehearsal: Rehearsal, forecast: Forecast, *, grid: Grid, until: float, options: Sequence[Estimate] = (),
    lost: Mapping[Candidate, Refused] | None = None,
) -> Decided:  # fmt: skip
    """The best of `options`, or of the whole grid where none of them is left; `lost` are known to be refused.

    Where a replay needs more than there is, what closed forms leave out is taken for as much of the others. One is
    replayed in any case; after `until`, and half a minute, the next is recommended as it is reckoned.

    Raises:
        LayoutError: nothing fits.
    """
    for candidate, own in sorted((lost or {}).items(), key=lambda one: _has_model_axes(one[0])):
        if not _is_left(candidate, forecast):  # after what was learnt of one before it
            continue
        if own.is_jobs and not _has_model_axes(candidate):  # a replica's code is as in one process
            refused = {**forecast.facts.refused, _micro(candidate): own.why}
            forecast = forecast.of(replace(forecast.facts, refused=refused))
        else:
            forecast = _without(rehearsal, forecast, candidate, own.why, is_jobs=own.is_jobs)
    device, seen = forecast.fleet.device, dict[str, Seen]()
    room, case = device.memory_bytes - device.reserve_bytes, None
    while True:
        options = [one for one in options if _is_left(one.candidate, forecast)]
        advice = advice_of(forecast, options, grid=grid) if options else advise(forecast, grid=grid)
        case = case or advice.case
        best = advice.recommended
        if seen and time.monotonic() > until + _MORE_SECONDS:
            break
        found = seen[str(best.candidate)] = rehearsal.replayed(best, forecast)
        if found.error:
            forecast = _without(rehearsal, forecast, best.candidate, found.error, is_jobs=found.is_jobs)
        elif found.peak_bytes <= room:
            break
        elif options:
            options = [one for one in options if one is not best]
        else:
            less = min(1 - _LEAST, room / found.peak_bytes)
            forecast = forecast.below(device.reserve_bytes + less * (best.peak_bytes - device.reserve_bytes))
    return Decided(forecast=forecast, advice=replace(advice, case=case), seen=seen)


def _is_left(candidate: Candidate, forecast: Forecast) -> bool:
    refused = forecast.facts.refused
    return not is_refused(candidate, forecast.facts) and _micro(candidate) not in refused


def _has_model_axes(candidate: Candidate) -> bool:
    return any(axis in words_of(candidate) for axis in MODEL_AXES)


def _alone_refused(rehearsal: Rehearsal, candidate: Candidate, forecast: Forecast) -> dict[str, str]:
    """That the job's own code takes no microbatch of that size, in one process either; of few samples it was seen."""
    if candidate.micro_batch_size <= _SEEN:
        return {}
    plain = Candidate(micro_batch_size=candidate.micro_batch_size, precision=candidate.precision)
    why = rehearsal.refusal(plain, forecast)
    return {_micro(candidate): why} if why else {}


def _micro(candidate: Candidate) -> str:
    return f"{MICRO}={candidate.micro_batch_size}"


def _without(rehearsal: Rehearsal, forecast: Forecast, candidate: Candidate, error: str, *, is_jobs: bool) -> Forecast:
    """Without what is to blame: its size of microbatch, an axis that is refused alone, or what was asked for last."""
    facts = forecast.facts
    if is_jobs and (why := _alone_refused(rehearsal, candidate, forecast)):
        return forecast.of(replace(facts, refused={**facts.refused, **why}))
    words = [word for word in words_of(candidate) if word not in facts.refused]
    if not words:
        raise LayoutError(error, hint="--layout single says all of it")
    axes = [axis for axis in MODEL_AXES if axis in words]
    refused = {words[-1]: error}
    if len(axes) > 1 or (axes and axes != words[-1:]):
        alone = {axis: rehearsal.refusal(_alone(candidate, axis), forecast) for axis in axes}
        refused = {axis: why for axis, why in alone.items() if why} or refused
    return forecast.of(replace(facts, refused={**facts.refused, **refused}))


def _alone(candidate: Candidate, axis: str) -> Candidate:
    """That axis and nothing beside it; experts are spread over replicas."""
    size = getattr(candidate, axis)
    found = Candidate(micro_batch_size=candidate.micro_batch_size, precision=candidate.precision)
    return replace(found, **{axis: size}, **({"dp_replicate": size} if axis == "ep" else {}))
