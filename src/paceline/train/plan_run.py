"""What runs for `plan`, in one process: the job's numbers, the search, and the finalists replayed as they would run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.plan.advice import Advice, Row, advice_of, advise
from paceline.plan.candidate import Candidate
from paceline.plan.estimate import Estimate
from paceline.plan.facts import ModelFacts
from paceline.plan.forecast import Forecast
from paceline.plan.hardware import Fleet, fleet_of
from paceline.plan.judged import Judged, judge
from paceline.plan.memory import PARTS, Memory
from paceline.plan.search import search_each
from paceline.plan.settle import Cluster, Facts, Plan, settle
from paceline.spec.settings import Settings
from paceline.spec.task import Task
from paceline.spec.update import parse_update
from paceline.spec.words import size
from paceline.store.disk import write_json
from paceline.store.planned import write_advice
from paceline.train.foreseen import grid_of
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
    names = list(task.options.get("layouts", ()))
    if "here" in task.options:
        found = chosen_here(ready, Here(**task.options["here"]), layouts=names)
    else:
        fleet, grid = fleet_of(task.options["fleet"]), grid_of(ready.settings, asked="paceline plan")
        learnt = learn(ready, most_ranks=fleet.ranks)
        forecast = Forecast(facts=learnt.facts, fleet=fleet)
        options = [] if names else [*search_each([forecast], grid=grid).best.values()]
        found = Chosen(learnt=learnt, forecast=forecast, grid=grid, options=options)
    if found is not None:
        advice, seen = _judged(found, names) if names else _decided(found)
        answer = _answer(advice, seen, found)
        answer["timed"] = [_as_timed(one) for one in found.options if one.timed is not None]
        write_advice(Path(task.run), answer)
        write_json(Path(task.run) / "answer-plan.json", answer)
        counted = {name: (one.peak_bytes, one.parts or {}) for name, one in seen.items() if not one.error}
        keep(ready, found.forecast.facts, found.forecast.fleet, replayed=counted)
    return 0


def numbers(payload: Mapping[str, Any]) -> int:
    """The job's numbers alone, for `simulate`."""
    task = Task.from_json(payload)
    found = learn(prepare(task), most_ranks=int(task.options["ranks"])).facts
    write_json(Path(task.run) / f"answer-{task.verb}.json", found.as_json())
    return 0


def _decided(chosen: Chosen) -> tuple[Advice, dict[str, Seen]]:
    """What is recommended has been replayed, and fits. Where it did not, what closed forms leave out is taken for as
    much of the others."""
    forecast, grid, options, seen = chosen.forecast, chosen.grid, chosen.options, dict[str, Seen]()
    ready, fleet, began = chosen.learnt.ready, forecast.fleet, time.monotonic()
    room = fleet.device.memory_bytes - fleet.device.reserve_bytes
    first = advice = advice_of(forecast, options, grid=grid)
    for _ in range(_MOST_TRIES):
        best = advice.recommended
        found = seen[str(best.candidate)] = replayed(ready, best, forecast)
        if not found.error and found.peak_bytes <= room:
            break
        if best.timed is not None:
            options = [one for one in options if one is not best]
            advice = advice_of(forecast, options, grid=grid)
            continue
        reckoned = best.peak_bytes - fleet.device.reserve_bytes
        less = 1 - _LEAST if found.error else min(1 - _LEAST, room / found.peak_bytes)
        advice = advise(forecast.below(reckoned * less + fleet.device.reserve_bytes), grid=grid)
    each = max(one.seconds / max(1, one.work) for one in seen.values())
    for row in advice.rows:
        candidate, left = row.estimate.candidate, _MOST_SECONDS - (time.monotonic() - began)
        if str(candidate) not in seen and each * _work(candidate, forecast.facts) < left:
            seen[str(candidate)] = replayed(ready, row.estimate, forecast)
    return replace(advice, case=first.case), seen


def _judged(chosen: Chosen, layouts: Sequence[str]) -> tuple[Judged, dict[str, Seen]]:
    """The layouts that were named, with what was timed of them; what time allows of them is replayed."""
    forecast, ready = chosen.forecast, chosen.learnt.ready
    began, seen = time.monotonic(), dict[str, Seen]()
    found = judge(forecast, layouts, micro_batch_size=ready.settings.train.micro_batch_size, timed=chosen.options)
    for row in found.rows:
        each = max((one.seconds / max(1, one.work) for one in seen.values()), default=0.0)
        candidate, left = row.estimate.candidate, _MOST_SECONDS - (time.monotonic() - began)
        if each * _work(candidate, forecast.facts) < left:
            seen[str(candidate)] = replayed(ready, row.estimate, forecast)
    return found, seen


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


def with_stages(settings: Settings, stages: tuple[int, ...]) -> Settings:
    """With as many blocks in each stage as the forecast has, where a run would cut otherwise by itself."""
    return settings if len(set(stages)) < 2 else replace(settings, place=replace(settings.place, stages=stages))


def replayed(ready: Ready, estimate: Estimate, forecast: Forecast) -> Seen:
    """The run's own step, as this estimate would place it on a device of the forecast's machines."""
    began, facts, candidate = time.monotonic(), forecast.facts, estimate.candidate
    try:
        plan = _settled(candidate, facts, forecast.fleet.device.kind)
        stages = replay(ready.job, with_stages(ready.settings, estimate.stages), plan)
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


def _answer(advice: Advice | Judged, seen: Mapping[str, Seen], chosen: Chosen) -> dict[str, Any]:
    forecast, facts, fleet = chosen.forecast, chosen.forecast.facts, chosen.forecast.fleet
    rows = tuple(_as_seen(row, seen.get(str(row.estimate.candidate)), fleet) for row in advice.rows)
    advice = replace(advice, rows=rows)
    lines = [f"{facts.parameters:,} parameters, global batch {facts.global_batch_size}, on {fleet}"]
    lines += [*([chosen.learnt.note] if chosen.learnt.note else []), *advice.lines()]
    told = {str(row.estimate.candidate) for row in rows}
    lines += [_lost(name, one, fleet) for name, one in seen.items() if name not in told]
    return {
        **advice.as_json(),
        "facts": facts.as_json(),
        "efficiency": forecast.efficiency.as_json(),
        "cluster": fleet.as_json(),
        "lines": lines,
    }


def _as_seen(row: Row, seen: Seen | None, fleet: Fleet) -> Row:
    """With what its replay counted in place of what was reckoned."""
    if seen is None:
        return row
    if seen.error:
        return replace(row, refused=seen.error)
    host, reserve = row.estimate.memory.host_bytes, fleet.device.reserve_bytes
    counted = {name: float(value) for name, value in (seen.parts or {}).items() if name in PARTS}
    memory = Memory(**counted, reserve=reserve, host_bytes=host)
    estimate = replace(row.estimate, memory=memory, limit_bytes=fleet.device.memory_bytes)
    return replace(row, estimate=estimate, replayed=True)


def _lost(name: str, seen: Seen, fleet: Fleet) -> str:
    """What was looked at on the way to the recommended one."""
    if seen.error:
        return f"  {name} can't be had: {seen.error}"
    return f"  {name} does not fit: {size(round(seen.peak_bytes + fleet.device.reserve_bytes))} when it was replayed"
