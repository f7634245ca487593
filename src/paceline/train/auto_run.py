"""What `--layout auto` runs before there are workers: the plan, and what a run may fall back to."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import LayoutError
from paceline.job import Job
from paceline.measure.probe.machines import machine_here
from paceline.plan.advice import Advice, advise
from paceline.plan.candidate import Candidate
from paceline.plan.estimate import Estimate
from paceline.plan.facts import ModelFacts
from paceline.plan.forecast import Forecast
from paceline.plan.grid import Grid, words_of
from paceline.plan.hardware import Fleet, fleet_of, of_family
from paceline.plan.ladder import ladder, rung_of
from paceline.plan.rung import Rung
from paceline.spec.task import Task
from paceline.spec.words import size
from paceline.store.disk import write_json
from paceline.train.auto import ANSWER, ORIGIN, SECONDS, as_before, to_plan, told
from paceline.train.foreseen import foreseen, grid_of
from paceline.train.kept import keep
from paceline.train.learn import learn_facts
from paceline.train.plan_run import Seen, replayed
from paceline.train.ready import Ready, prepare

_LEAST = 0.02


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A recommendation that has been replayed, unless there was no time left to."""

    forecast: Forecast
    advice: Advice
    seen: Seen | None


def choose(payload: Mapping[str, Any]) -> int:
    """Write the answer into the folder that the task names."""
    task = Task.from_json(payload)
    fleet, seconds = fleet_of(task.options["fleet"]), float(task.options["seconds"])
    write_json(Path(task.run) / ANSWER, decided(prepare(task), fleet, seconds=seconds))
    return 0


def learn(payload: Mapping[str, Any]) -> int:
    """The model's numbers alone."""
    task = Task.from_json(payload)
    ready = prepare(task)
    write_json(Path(task.run) / ANSWER, learnt_here(ready, most_ranks=int(task.options["most_ranks"])))
    return 0


def learnt_here(ready: Ready, *, most_ranks: int) -> dict[str, Any]:
    """The same in this process."""
    ready, _ = foreseen(ready)
    return {"facts": learn_facts(ready.job, ready.settings, most_ranks=most_ranks).as_json()}


def settled_here(task: Task, *, job: Job) -> Task:
    """The task of a `pl.Run` with a layout, planned in this process: a job that a script has made is only here."""
    kept = as_before(task)
    if kept is not None:
        return kept
    here = machine_here(ranks=task.ranks, device=task.device)
    return told(task, decided(prepare(to_plan(task), job=job), here.fleet, seconds=SECONDS), here)


def decided(ready: Ready, fleet: Fleet, *, seconds: float) -> dict[str, Any]:
    """The rungs, the first of which is recommended, with why; nothing is replayed any more after so many seconds.

    Raises:
        LayoutError: nothing fits.
        UsageError: the job's settings leave nothing to choose.
    """
    began = time.monotonic()
    grid = grid_of(ready.settings, asked="--layout auto")
    ready, _ = foreseen(ready)
    facts = learn_facts(ready.job, ready.settings, most_ranks=fleet.ranks)
    chosen = _chosen(ready, facts, fleet, grid, until=began + seconds)
    best = chosen.advice.recommended
    if chosen.seen is not None:
        counted = {str(best.candidate): (chosen.seen.peak_bytes, chosen.seen.parts or {})}
        keep(ready, facts, fleet, replayed=counted)
    below = ladder(chosen.forecast, best, grid=grid)
    rungs = [_rung(best, chosen.seen, fleet), *(_rung(one, None, fleet) for one in below)]
    return {
        "rungs": [rung.as_json() for rung in rungs],
        "case": chosen.advice.case.number,
        "why": chosen.advice.rows[0].why,
        "second": _second(chosen.advice, rungs),
        "seconds": time.monotonic() - began,
        "facts": facts.as_json(),
        "cluster": fleet.as_json(),
    }


def _chosen(ready: Ready, facts: ModelFacts, fleet: Fleet, grid: Grid, *, until: float) -> Chosen:
    """Where a replay needs more than there is, less is taken for there; what it is refused is not looked at again."""
    forecast = Forecast(facts=facts, fleet=fleet)
    room, reserve = fleet.device.memory_bytes - fleet.device.reserve_bytes, fleet.device.reserve_bytes
    while True:
        advice = advise(forecast, grid=grid)
        best = advice.recommended
        if time.monotonic() > until:
            return Chosen(forecast=forecast, advice=advice, seen=None)
        seen = replayed(ready, best, forecast)
        if seen.error:
            facts = _without(facts, best.candidate, seen.error)
            forecast = Forecast(facts=facts, fleet=forecast.fleet)
        elif seen.peak_bytes <= room:
            return Chosen(forecast=forecast, advice=advice, seen=seen)
        else:
            less = min(1 - _LEAST, room / seen.peak_bytes)
            forecast = forecast.below(reserve + less * (best.peak_bytes - reserve))


def _without(facts: ModelFacts, candidate: Candidate, error: str) -> ModelFacts:
    words = [word for word in words_of(candidate) if word not in facts.refused]
    if not words:
        raise LayoutError(error, hint="--layout single says all of it")
    return replace(facts, refused={**facts.refused, words[-1]: error})


def _rung(estimate: Estimate, seen: Seen | None, fleet: Fleet) -> Rung:
    family, counted = estimate.candidate.family, None if seen is None else (seen.peak_bytes, dict(seen.parts or {}))
    longer, fuller = of_family(fleet.longer, family), of_family(fleet.fuller, family)
    return rung_of(estimate, replayed=counted, longer=longer, fuller=fuller, source=ORIGIN)


def _second(advice: Advice, rungs: list[Rung]) -> str:
    """What came second, and by how much; of no other family one that needs less."""
    others = [row for row in advice.rows[1:] if row.estimate.fits]
    if others:
        return f"{others[0].estimate.candidate}, {others[0].why}"
    if len(rungs) > 1:
        times = rungs[1].step_seconds / rungs[0].step_seconds
        return f"{rungs[1]}, {times:.2f} times as long, {size(rungs[1].peak_bytes)} at most"
    return "nothing else fits"
