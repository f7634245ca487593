"""A plan for the machines that this runs on: what a probe finds of them, and what steps take there."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import JobError, PacelineError, as_refused, user_line
from paceline.measure.others import look, most_of_others
from paceline.measure.probe.cache import fingerprint
from paceline.measure.probe.worker import probe_world
from paceline.plan.candidate import Candidate
from paceline.plan.estimate import Estimate, Timed
from paceline.plan.facts import ModelFacts
from paceline.plan.forecast import Forecast
from paceline.plan.grid import Grid
from paceline.plan.hardware import Fleet, fleet_of
from paceline.plan.here import fleet_here
from paceline.plan.judged import judge
from paceline.plan.timed import Refused, Try, in_turn, retimed, shortlist, try_of
from paceline.store.runs import ROOT
from paceline.survive.short import is_shortage, only_new
from paceline.train.beside import Helper, NoAnswer
from paceline.train.deep import FEWEST
from paceline.train.foreseen import foreseen, grid_of
from paceline.train.learn import learn_facts
from paceline.train.ready import Ready, join_world
from paceline.train.shallow import shallow
from paceline.train.trial import can_be_cut, time_layouts
from paceline.world import Place, World


@dataclass(frozen=True, kw_only=True)
class Here:
    """Seconds to time layouts; and the machines, as a `Fleet`'s JSON, or what is left to do to know them: seconds of a
    probe by all ranks, `ranks_per_node` of them, and the bytes that a node or each of its GPUs has.
    """

    seconds: float
    fleet: Mapping[str, Any] | None = None
    probe_seconds: float = 0.0
    ranks_per_node: int = 1
    node_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """A job as it is (`real`) and as it can be replayed, its numbers, the lengths of its lists of like blocks, and what
    there is to say of it."""

    real: Ready
    ready: Ready
    facts: ModelFacts
    depths: Sequence[int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What is forecast of a job, and the layouts among which to choose, each of which should fit.

    `lost` are those that were refused where they were to be timed, with why; `others` is the share of the cores that
    other programs had meanwhile.
    """

    learnt: Learnt
    forecast: Forecast
    grid: Grid
    options: Sequence[Estimate]
    lost: Mapping[Candidate, Refused] = field(default_factory=dict)
    others: float = 0.0


@only_new()
def learn(ready: Ready, *, most_ranks: int, helper: Helper | None = None) -> Learnt:
    """Without a device and without the model's memory. A `helper` begins with what a deep model's replay will ask.

    Raises:
        PacelineError: the job can't be run even so.
    """
    real = ready
    try:
        ready, notes = foreseen(ready)
        depths = shallow(ready.job)[1]
        if helper is not None and sum(depths) >= FEWEST:
            with suppress(NoAnswer):
                helper.begin("told")
        facts = learn_facts(ready.job, ready.settings, most_ranks=most_ranks)
    except PacelineError:
        raise
    except Exception as error:  # of the job's own code
        if is_shortage(error):
            raise
        raise _unplanned(error) from error
    return Learnt(real=real, ready=ready, facts=facts, depths=depths if can_be_cut(ready) else [], notes=notes)


def _unplanned(error: Exception) -> JobError:
    return JobError(
        f"the job can't be looked at without its numbers: {as_refused(error)}",
        where=str(user_line(error) or ""),
        cause="to plan, it runs on memory without numbers, where every comparison of numbers holds and a number is 1; "
        "or it fails with numbers too",
        hint="a layout by name, which asks for no plan: paceline train JOB --layout ddp",
    )


def chosen_here(ready: Ready, here: Here, *, layouts: Sequence[str] = ()) -> Chosen | None:
    """Rank 0 learns what the job is, and chooses what all of them time, or takes what was named; the others get
    nothing. Every rank calls this.

    Ranks that have numbers and those that have none are never in one process group: so learning comes first.
    """
    place, grid = Place.read(os.environ), grid_of(ready.settings, asked="paceline plan")
    learnt = learn(ready, most_ranks=place.world_size) if place.rank == 0 else None
    world = join_world(ready)  # closed at the end alone: after an error others would see its end before they hear why
    fleet = _fleet(ready, here, world)
    found = None
    if learnt is None:
        if here.seconds:
            _timed(ready, [], (), world=world, seconds=here.seconds)
    else:
        forecast = Forecast(facts=learnt.facts, fleet=fleet)
        options = _named(ready, forecast, layouts) if layouts else shortlist(forecast, grid=grid)
        lost: dict[Candidate, Refused] = {}
        others = 0.0
        if here.seconds:
            options, lost, others = _timed(ready, options, learnt.depths, world=world, seconds=here.seconds)
        found = Chosen(learnt=learnt, forecast=forecast, grid=grid, options=options, lost=lost, others=others)
    world.close()
    return found


def _named(ready: Ready, forecast: Forecast, layouts: Sequence[str]) -> list[Estimate]:
    """Those that are of all ranks, and fit."""
    found = judge(forecast, layouts, micro_batch_size=ready.settings.train.micro_batch_size)
    own = [row.estimate for row in found.rows]
    return [one for one in own if one.fits and one.candidate.ranks == forecast.fleet.ranks]


def _fleet(ready: Ready, here: Here, world: World) -> Fleet:
    if here.fleet is not None:
        return fleet_of(here.fleet)
    ranks, local = world.world_size, here.ranks_per_node
    mark = fingerprint(ranks=ranks, device=ready.plan.device, ranks_per_node=local)
    probe = probe_world(world, mark, seconds=here.probe_seconds, folder=Path(ROOT).absolute(), ranks_per_node=local)
    nodes = ranks / local if ready.plan.device == "cpu" else 1
    return fleet_here(probe, ranks=ranks, memory_bytes=nodes * here.node_bytes)


def _timed(
    ready: Ready, options: Sequence[Estimate], depths: Sequence[int], *, world: World, seconds: float
) -> tuple[list[Estimate], dict[Candidate, Refused], float]:
    """Those of rank 0's options that can be had, with what their steps took; the others, with why; and the share of the
    cores that other programs had meanwhile."""
    told, depths = world.share_json([[try_of(one).as_json() for one in in_turn(options)], list(depths)])
    before = look()
    found = time_layouts(ready, [Try(**one) for one in told], depths=depths, world=world, seconds=seconds)
    others = most_of_others([before, look()], world)
    lost = {one.candidate: why for one in options if isinstance(why := found.get(str(one.candidate)), Refused)}
    had = [one for one in options if one.candidate not in lost]
    return retimed(had, {name: one for name, one in found.items() if isinstance(one, Timed)}), lost, others
