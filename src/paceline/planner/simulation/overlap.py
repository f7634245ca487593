"""Collectives of a step outside its pipeline: when they run, and how much of them compute can hide."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from paceline.console.formatting import plural
from paceline.errors import UsageError
from paceline.schedule.action_walk import Costs, PerStage, of_stage
from paceline.schedule.program import Program


class When(StrEnum):
    """The point of a step at which a collective runs in each stage."""

    START = "start"  # once a step, before the stage's first forward: parameters that stay gathered
    FORWARD = "forward"  # with each forward: tensor parallel sums, parameters gathered for use, a ring of keys
    BACKWARD = "backward"  # with each backward
    END = "end"  # once a step, after the stage's last backward: gradients


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The seconds that a stage's ranks communicate on axes other than pp, one number for all stages or one for each.

    `overlap` is the fraction that can run in parallel with its compute, 0 to 1; the rest comes before or after it.
    """

    name: str
    when: When
    seconds: PerStage
    overlap: float = 0.0


def with_collectives(program: Program, *, costs: Costs, collectives: Sequence[Collective]) -> Costs:
    """Return costs whose computes include their collectives, and whose stages wait for those at the start."""
    stages = range(program.num_stages)

    def beside(seconds: Sequence[float], when: When) -> list[float]:
        own = [c for c in collectives if c.when is when]
        return [_beside(own, seconds[stage], stage=stage) for stage in stages]

    def each(value: PerStage) -> list[float]:
        return [of_stage(value, stage) for stage in stages]

    weight, inputs = each(costs.weight), each(costs.input)
    both = [i + w for i, w in zip(inputs, weight, strict=True)] if costs.backward is None else each(costs.backward)
    longer = replace(
        costs,
        forward=beside(each(costs.forward), When.FORWARD),
        input=beside(inputs, When.BACKWARD),
        weight=weight,
        backward=beside(both, When.BACKWARD),
    )
    return replace(longer, ready=_ready(program, costs=longer, collectives=collectives))


def slow_down_rank(program: Program, *, costs: Costs, rank: int, factor: float) -> Costs:
    """Return the costs with one rank's computes taking `factor` times as long."""

    def on_rank(value: PerStage) -> list[float]:
        own = program.rank_of_stage
        return [of_stage(value, stage) * (factor if owner == rank else 1) for stage, owner in enumerate(own)]

    return replace(
        costs,
        forward=on_rank(costs.forward),
        input=on_rank(costs.input),
        weight=on_rank(costs.weight),
        backward=None if costs.backward is None else on_rank(costs.backward),
        update=on_rank(costs.update),
    )


def gradient_ready_time(
    collectives: Iterable[Collective], *, stage: int, start: float, stop: float, free: float
) -> float:
    """Return when a stage's gradients are reduced, if its last backward runs from `start` to `stop`.

    The link is available from `free` on. Gradients become ready while that backward runs: what may overlap runs in
    parallel with it, the rest after it.
    """
    done = free
    for collective in collectives:
        if collective.when is When.END:
            seconds = of_stage(collective.seconds, stage)
            done = max(max(done, start) + seconds, stop + (1 - collective.overlap) * seconds)
    return max(done, stop)


def refuse_bad_numbers(program: Program, *, costs: Costs, collectives: Iterable[Collective]) -> None:
    """Raise UsageError if a time is negative or not finite, a stage lacks one, or an overlap is not in 0 to 1.

    Raises:
        UsageError: the first number that is invalid.
    """
    for name, value, count in _values(program, costs, collectives):
        if isinstance(value, Sequence) and len(value) < count:
            raise UsageError(
                f"{name} has {plural(len(value), 'number')} for {plural(program.num_stages, 'stage')}.",
                hint="one number for all stages, or one for each",
            )
        for seconds in value if isinstance(value, Sequence) else (value,):
            if not (isfinite(seconds) and seconds >= 0):
                raise UsageError(f"{name}={seconds:g}: a time of 0 seconds or more is needed.")
    for collective in collectives:
        if not 0 <= collective.overlap <= 1:
            raise UsageError(
                f"{collective.name}: overlap={collective.overlap:g}: it must be between 0 and 1.",
                hint="0.8 if four fifths of it overlap with compute",
            )


def _values(program: Program, costs: Costs, collectives: Iterable[Collective]) -> Iterator[tuple[str, PerStage, int]]:
    stages = program.num_stages
    for name in ("forward", "input", "weight", "update", "ready"):
        yield name, getattr(costs, name), stages
    if costs.backward is not None:
        yield "backward", costs.backward, stages
    yield "transfer", costs.transfer, stages - 1
    yield "latency", costs.latency, 0
    for collective in collectives:
        yield collective.name, collective.seconds, stages


def _beside(collectives: Iterable[Collective], seconds: float, *, stage: int) -> float:
    hidden = shown = 0.0
    for collective in collectives:
        whole = of_stage(collective.seconds, stage)
        hidden += collective.overlap * whole
        shown += (1 - collective.overlap) * whole
    return max(seconds, hidden) + shown


def _ready(program: Program, *, costs: Costs, collectives: Iterable[Collective]) -> list[float]:
    """Return when each stage may begin.

    A rank gathers for its stages in turn; a forward may begin while the part that may overlap is still being gathered.
    """
    own = [c for c in collectives if c.when is When.START]
    found = [of_stage(costs.ready, stage) for stage in range(program.num_stages)]
    for rank in range(program.num_ranks):
        now = 0.0
        for stage in program.stages_of(rank):
            now += sum(of_stage(c.seconds, stage) for c in own)
            beside = sum(c.overlap * of_stage(c.seconds, stage) for c in own)
            begins = max(now - beside, now - of_stage(costs.forward, stage))
            found[stage] = max(found[stage], begins)
    return found
