"""What runs for `plan`, in one process: the job's numbers, the search, and the finalists replayed as they would run."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.plan.advice import Advice, advise
from paceline.plan.candidate import Candidate
from paceline.plan.estimate import Estimate
from paceline.plan.facts import ModelFacts
from paceline.plan.forecast import Forecast
from paceline.plan.hardware import Fleet, fleet_of
from paceline.plan.settle import Cluster, Facts, Plan, settle
from paceline.spec.settings import Settings
from paceline.spec.task import Task
from paceline.spec.update import parse_update
from paceline.spec.words import size
from paceline.store.disk import write_json
from paceline.store.runs import RunFolder
from paceline.train.learn import learn_facts
from paceline.train.ready import Ready, prepare
from paceline.train.replay import Replayed, replay, shortened
from paceline.train.shallow import built_once

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
    """Write the answer beside the run's other files."""
    task = Task.from_json(payload)
    ready = prepare(task)
    ready = replace(ready, job=built_once(ready.job, seed=ready.settings.seed))
    fleet = fleet_of(task.options["fleet"])
    facts = learn_facts(ready.job, ready.settings, most_ranks=fleet.ranks)
    advice, seen = _decided(ready, facts, fleet)
    write_json(RunFolder(Path(task.run)).path / "answer-plan.json", _answer(advice, seen, facts, fleet))
    return 0


def _decided(ready: Ready, facts: ModelFacts, fleet: Fleet) -> tuple[Advice, dict[str, Seen]]:
    """What is recommended has been replayed, and fits. Where it did not, what closed forms leave out is taken for as
    much of the others."""
    forecast, seen, began = Forecast(facts=facts, fleet=fleet), dict[str, Seen](), time.monotonic()
    room = fleet.device.memory_bytes - fleet.device.reserve_bytes
    first = advice = advise(forecast)
    for _ in range(_MOST_TRIES):
        best = advice.recommended
        found = seen[str(best.candidate)] = _replayed(ready, best, facts, fleet)
        if not found.error and found.peak_bytes <= room:
            break
        reckoned = best.peak_bytes - fleet.device.reserve_bytes
        less = 1 - _LEAST if found.error else min(1 - _LEAST, room / found.peak_bytes)
        advice = advise(forecast.below(reckoned * less + fleet.device.reserve_bytes))
    each = max(one.seconds / max(1, one.work) for one in seen.values())
    for row in advice.rows:
        candidate, left = row.estimate.candidate, _MOST_SECONDS - (time.monotonic() - began)
        if str(candidate) not in seen and each * _work(candidate, facts) < left:
            seen[str(candidate)] = _replayed(ready, row.estimate, facts, fleet)
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


def with_stages(settings: Settings, stages: tuple[int, ...]) -> Settings:
    """With as many blocks in each stage as the forecast has, where a run would cut otherwise by itself."""
    return settings if len(set(stages)) < 2 else replace(settings, place=replace(settings.place, stages=stages))


def _replayed(ready: Ready, estimate: Estimate, facts: ModelFacts, fleet: Fleet) -> Seen:
    began, candidate = time.monotonic(), estimate.candidate
    try:
        plan = _settled(candidate, facts, fleet.device.kind)
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


def _answer(advice: Advice, seen: Mapping[str, Seen], facts: ModelFacts, fleet: Fleet) -> dict[str, Any]:
    found = advice.as_json()
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
