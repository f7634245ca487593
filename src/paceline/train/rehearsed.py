"""Finalists of a plan as they would run: the run's own step without numbers, and what only numbers can tell."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from paceline.errors import DataError, LayoutError, PacelineError, as_refused
from paceline.plan.advice import Row
from paceline.plan.candidate import Candidate
from paceline.plan.estimate import Estimate
from paceline.plan.facts import ModelFacts
from paceline.plan.forecast import Forecast
from paceline.plan.hardware import Device
from paceline.plan.margins import bytes_margin
from paceline.plan.memory import PARTS, Memory
from paceline.plan.settle import Cluster, Facts, Plan, settle
from paceline.spec.settings import Settings
from paceline.spec.update import parse_update
from paceline.survive.short import is_shortage
from paceline.train.beside import Helper
from paceline.train.deep import Chain
from paceline.train.ready import Ready
from paceline.train.replay import Replayed, shortened
from paceline.train.tried_parts import refuse_parts


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A finalist as it was replayed: its fullest stage; `error` where it would be refused, `is_jobs` if the job's own
    code raised it.
    """

    layout: str
    peak_bytes: int = 0
    parts: Mapping[str, int] | None = None
    error: str = ""
    is_jobs: bool = False
    seconds: float = 0.0
    work: int = 0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """`ready` has a model without numbers, `real` the job as it is. What was asked once is remembered."""

    ready: Ready
    real: Ready
    helper: Helper | None = None
    known: dict[str, Seen] = field(default_factory=dict)
    parts: dict[tuple[int, int], str] = field(default_factory=dict)

    @cached_property
    def chain(self) -> Chain:
        return Chain(self.ready.job, self.ready.settings, self.helper)

    def replayed(self, estimate: Estimate, forecast: Forecast) -> Seen:
        """As this estimate would be placed on a device of the forecast's machines."""
        name = f"{estimate.candidate} {estimate.stages}"
        if name not in self.known:
            self.known[name] = self._replayed(estimate.candidate, estimate.stages, forecast, estimate.timed is not None)
        return self.known[name]

    def refusal(self, candidate: Candidate, forecast: Forecast) -> str:
        """Why it can't be had, or nothing."""
        return self._replayed(candidate, (), forecast, False).error

    def is_of_parts(self, candidate: Candidate, error: str) -> bool:
        """Whether that is what parts of its sequences, or its experts elsewhere, gave: in any microbatch and layout."""
        return bool(error) and self.parts.get((candidate.cp, candidate.ep)) == error

    def work(self, candidate: Candidate, cut: tuple[int, ...], forecast: Forecast) -> int:
        """How many blocks run in its replay, all stages together."""
        plan = shortened(settled_plan(candidate, forecast.facts, forecast.fleet.device.kind))
        blocks = _blocks(candidate, cut, forecast.facts)
        return plan.num_micro // plan.replicas * max(1, self.chain.replayed(self.ready.settings, plan, blocks))

    def _replayed(self, candidate: Candidate, cut: tuple[int, ...], forecast: Forecast, has_run: bool) -> Seen:
        began, facts = time.monotonic(), forecast.facts
        try:
            if not has_run:
                self._refuse_parts(candidate, facts)
            plan = settled_plan(candidate, facts, forecast.fleet.device.kind)
            settings = with_stages(self.ready.settings, cut)
            blocks = _blocks(candidate, cut, facts)
            stages = self.chain.replay(settings, plan, blocks)
        except DataError:
            raise
        except PacelineError as error:
            return Seen(layout=candidate.layout, error=error.what)
        except Exception as error:  # of the job's own code, which goes on without this layout
            if is_shortage(error):
                raise
            return Seen(layout=candidate.layout, error=as_refused(error), is_jobs=True)
        fullest: Replayed = max(stages, key=lambda stage: stage.peak.total)
        return Seen(
            layout=candidate.layout,
            peak_bytes=fullest.peak.total,
            parts=fullest.peak.as_json(),
            seconds=time.monotonic() - began,
            work=self.work(candidate, cut, forecast),
        )

    def _refuse_parts(self, candidate: Candidate, facts: ModelFacts) -> None:
        """Raises: LayoutError, where parts of sequences, or experts elsewhere, give something else than the whole."""
        key = (candidate.cp, candidate.ep)
        if key == (1, 1):
            return
        if key not in self.parts:
            self.parts[key] = ""
            try:
                refuse_parts(self.real, cp=candidate.cp, ep=candidate.ep, elements=facts.parameters)
            except LayoutError as error:
                self.parts[key] = error.what
        if self.parts[key]:
            raise LayoutError(self.parts[key])


def row_seen(row: Row, seen: Mapping[str, Seen], device: Device) -> Row:
    """Return the row with what its replay counted in place of what was forecast, or with why it was refused."""
    found = seen.get(str(row.estimate.candidate))
    if found is None:
        return row
    if found.error:
        return replace(row, refused=found.error)
    counted = {name: float(value) for name, value in (found.parts or {}).items() if name in PARTS}
    memory = Memory(**counted, reserve=device.reserve_bytes, host_bytes=row.estimate.memory.host_bytes)
    estimate = replace(
        row.estimate,
        memory=memory,
        margin_bytes=bytes_margin(memory, device, is_replayed=True),
        limit_bytes=device.memory_bytes,
    )
    return replace(row, estimate=estimate, replayed=True)


def settled_plan(candidate: Candidate, facts: ModelFacts, device: str) -> Plan:
    """As a run of it would be planned."""
    return settle(
        layout=candidate.asked,
        update=parse_update("sync"),
        cluster=Cluster(ranks=candidate.ranks, device=device),
        facts=Facts(global_batch_size=facts.global_batch_size, micro_batch_size=candidate.micro_batch_size),
    )


def _blocks(candidate: Candidate, cut: tuple[int, ...], facts: ModelFacts) -> tuple[int, ...]:
    """Of each stage: as it is cut, or about as a run would cut it."""
    stages = candidate.pp * candidate.virtual
    each, more = divmod(len(facts.blocks), stages)
    return cut or tuple(each + (stage < more) for stage in range(stages))


def with_stages(settings: Settings, stages: tuple[int, ...]) -> Settings:
    """With as many blocks in each stage as the forecast has, where a run would cut otherwise by itself."""
    return settings if len(set(stages)) < 2 else replace(settings, place=replace(settings.place, stages=stages))
