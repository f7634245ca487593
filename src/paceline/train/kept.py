"""Plans of jobs that are kept for their runs: written by whoever plans, and read as a forecast of one layout."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError
from paceline.measure.probe.machines import kept_here
from paceline.measure.remembered import keep_plan
from paceline.plan.candidate import candidate_of
from paceline.plan.facts import ModelFacts, read_facts
from paceline.plan.forecast import Forecast
from paceline.plan.hardware import Fleet, fleet_of
from paceline.plan.ladder import rung_here
from paceline.plan.rung import Rung
from paceline.train.foretold import key_of
from paceline.train.ready import Ready
from paceline.train.timed_here import as_timed_here

SOURCE = "plan"
Counted = tuple[int, Mapping[str, int]]


def keep(ready: Ready, facts: ModelFacts, fleet: Fleet, *, replayed: Mapping[str, Counted]) -> None:
    """The model's numbers, the machines, and what of its layouts was replayed there: bytes, and their parts."""
    with suppress(PacelineError, OSError):  # the job of a script has no file of its own
        keep_plan(key_of(ready), {"facts": facts.as_json(), "cluster": fleet.as_json(), "replayed": replayed})


def estimated(found: Mapping[str, Any], ready: Ready, *, parameters: int) -> Rung | None:
    """Of the layout that runs, for this machine where it was measured, else for the one that was planned for; by steps
    that were timed here, where they were."""
    plan, facts, fleet = ready.plan, read_facts(found["facts"]), fleet_of(found["cluster"])
    trained = facts.parameters - sum(part.frozen_parameters for part in facts.parts)
    if trained != parameters or facts.global_batch_size != plan.global_batch_size:
        return None
    if (here := kept_here(ranks=plan.mesh.ranks, device=plan.device)) is not None:
        counted = found["replayed"] if fleet.device.kind == here.device.kind else {}
        fleet = here
    elif fleet.device.kind == plan.device and fleet.ranks == plan.mesh.ranks:
        counted = found["replayed"]
    else:
        return None
    precision, forecast = ready.settings.train.precision, Forecast(facts=facts, fleet=fleet)
    candidate = candidate_of(
        plan.asked, plan.mesh, micro_batch_size=plan.micro_batch_size, precision=precision, compiles=facts.compiles
    )
    own = counted.get(str(candidate))
    return rung_here(
        as_timed_here(ready, forecast, forecast.estimate(candidate)),
        forecast,
        source=SOURCE,
        replayed=None if own is None else (int(own[0]), own[1]),
    )
