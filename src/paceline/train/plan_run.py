"""What runs for `plan`, in one process: the job's numbers, the search, and the finalists replayed as they would run."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.plan.advice import Advice, advice_of, advise
from paceline.plan.candidate import Candidate
from paceline.plan.estimate import Estimate
from paceline.plan.facts import ModelFacts
from paceline.plan.forecast import Forecast
from paceline.plan.hardware import fleet_of
from paceline.plan.search import search_each
from paceline.plan.settle import Cluster, Facts, Plan, settle
from paceline.spec.task import Task
from paceline.spec.update import parse_update
from paceline.spec.words import size
from paceline.store.disk import write_json
from paceline.store.runs import RunFolder
from paceline.train.kept import keep
from paceline.train.plan_here import Chosen, Here, chosen_here, learn
from paceline.train.ready import Ready, prepare
from paceline.train.replay import Replayed, replay, shortened

_MOST_SECONDS = 45.0
_MOST_TRIES = 4
_LEAST = 0.02


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A finalist as it was replayed: its fullest stage; `error` where it would be refused."""

    layout: str
    peak_bytes: int = 0
    parts: Mapping[str, int] | None = None
    error: str = ""
    seconds: float = 0.0
    work: int = 0


def plan(payload: Mapping[str, Any]) -> int:
    """Write the answer beside the run's other files. Where the cluster is what this runs on, every rank calls this."""
    task = Task.from_json(payload)
    ready = prepare(task)
    if "here" in task.options:
        found = chosen_here(ready, Here(**task.options["here"]))
    else:
        fleet = fleet_of(task.options["fleet"])
        learnt = learn(ready, most_ranks=fleet.ranks)
        forecast = Forecast(facts=learnt.facts, fleet=fleet)
        found = Chosen(learnt=learnt, forecast=forecast, options=[*search_each([forecast]).best.values()])
    if found is not None:
        advice, seen = _decided(found)
        answer = _answer(advice, seen, found.forecast)
        answer["timed"] = [_as_timed(one) for one in found.options if one.timed is not None]
        write_json(RunFolder(Path(task.run)).path / "answer-plan.json", answer)
        counted = {name: (one.peak_bytes, one.parts or {}) for name, one in seen.items() if not one.error}
        keep(ready, found.forecast.facts, found.forecast.fleet, replayed=counted)
    return 0


def _decided(chosen: Chosen) -> tuple[Advice, dict[str, Seen]]:
    """What is recommended has been replayed, and fits. Where it did not, what closed forms leave out is taken for as
    much of the others."""
    forecast, options, seen = chosen.forecast, chosen.options, dict[str, Seen]()
    ready, fleet, began = chosen.learnt.ready, forecast.fleet, time.monotonic()
    room = fleet.device.memory_bytes - fleet.device.reserve_bytes
    first = advice = advice_of(forecast, options)
    for _ in range(_MOST_TRIES):
        best = advice.recommended
        found = seen[str(best.candidate)] = replayed(ready, best.candidate, forecast)
        if not found.error and found.peak_bytes <= room:
            break
        if best.timed is not None:
            options = [one for one in options if one is not best]
            advice = advice_of(forecast, options)
            continue
        reckoned = best.peak_bytes - fleet.device.reserve_bytes
        less = 1 - _LEAST if found.error else min(1 - _LEAST, room / found.peak_bytes)
        advice = advise(forecast.below(reckoned * less + fleet.device.reserve_bytes))
    each = max(one.seconds / max(1, one.work) for one in seen.values())
    for row in advice.rows:
        candidate, left = row.estimate.candidate, _MOST_SECONDS - (time.monotonic() - began)
        if str(candidate) not in seen and each * _work(candidate, forecast.facts) < left:
            seen[str(candidate)] = replayed(ready, candidate, forecast)
    return replace(advice, case=first.case), seen


def _settled(candidate: Candidate, facts: ModelFacts, device: str) -> Plan:
    return settle(
        layout=candidate.asked,
        update=parse_update("sync"),
        cluster=Cluster(ranks=candidate.ranks, device=device),
        facts=Facts(global_batch_size=facts.global_batch_size, micro_batch_size=candidate.micro_batch_size),
    )


def _work(candidate: Candidate, facts: ModelFacts) -> int:
    """How many blocks run in a replay, all stages together."""
    plan = shortened(_settled(candidate, facts, "cuda"))
    return plan.num_micro // plan.replicas * max(1, len(facts.blocks))


def replayed(ready: Ready, candidate: Candidate, forecast: Forecast) -> Seen:
    """The run's own step, as this candidate would place it on a device of the forecast's machines."""
    began, facts = time.monotonic(), forecast.facts
    try:
        plan = _settled(candidate, facts, forecast.fleet.device.kind)
        stages = replay(ready.job, ready.settings, plan)
    except PacelineError as error:
        return Seen(layout=candidate.layout, error=error.what)
    fullest: Replayed = max(stages, key=lambda stage: stage.peak.total)
    return Seen(
        layout=candidate.layout,
        peak_bytes=fullest.peak.total,
        parts=fullest.peak.as_json(),
        seconds=time.monotonic() - began,
        work=_work(candidate, facts),
    )


def _as_timed(estimate: Estimate) -> dict[str, Any]:
    """One layout that was timed here, whether or not it is the best of its family."""
    assert estimate.timed is not None
    return {
        "layout": estimate.layout,
        "settings": estimate.settings,
        "step_seconds": estimate.step_seconds,
        **asdict(estimate.timed),
    }


def _answer(advice: Advice, seen: Mapping[str, Seen], forecast: Forecast) -> dict[str, Any]:
    found, facts, fleet = advice.as_json(), forecast.facts, forecast.fleet
    reserve = fleet.device.reserve_bytes
    for row, told in zip(advice.rows, found["plans"], strict=True):
        one = seen.get(str(row.estimate.candidate))
        told["replayed"] = one is not None and not one.error
        if one is None:
            continue
        if one.error:
            told |= {"fits": False, "why": one.error}
            continue
        told["peak_bytes"] = round(one.peak_bytes + reserve)
        told["parts"] = {**dict(one.parts or {}), "reserve": round(reserve)}
        told["fits"] = one.peak_bytes + reserve <= fleet.device.memory_bytes
    lines = [*advice.lines()]
    own = [one for one in seen.values() if not one.error]
    if own:
        lines.append("replayed, operation by operation, without the reserve:")
        lines += [f"  {one.layout}: {size(one.peak_bytes)} at most, on the fullest rank" for one in own]
    lines += [f"  {one.layout} can't be had: {one.error}" for one in seen.values() if one.error]
    head = f"{facts.parameters:,} parameters, global batch {facts.global_batch_size}, on {fleet}"
    return {**found, "facts": facts.as_json(), "cluster": fleet.as_json(), "lines": [head, *lines]}
