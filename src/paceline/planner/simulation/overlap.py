"""Add collectives to the times of a step. A collective runs at a point of the step, and compute can hide a part of it.

Messages between pipeline stages are not collectives.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from paceline.console.formatting import plural
from paceline.errors import UsageError
from paceline.schedule.action_walk import Costs, PerStage, value_for_stage
from paceline.schedule.program import Program


class StepPoint(StrEnum):
    """The point of a step at which a collective runs in each stage."""

    START = "start"  # once per step, before the stage's first forward: parameters that stay gathered
    FORWARD = "forward"  # with each forward: tensor-parallel sums, gathered parameters, ring attention
    BACKWARD = "backward"  # with each backward
    END = "end"  # once per step, after the stage's last backward: gradients


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of the ranks of a stage, on axes other than pp."""

    name: str
    point: StepPoint
    seconds: PerStage
    """The time of the collective: one number for all stages, or one for each."""
    overlap: float = 0.0
    """The fraction, 0 to 1, that can overlap the stage's compute. The rest runs before or after the compute."""


def with_collectives(program: Program, *, costs: Costs, collectives: Sequence[Collective]) -> Costs:
    """Return the costs with collectives added.

    The time of each compute includes the collectives that run with it. Each stage waits for the collectives at the
    start of the step.
    """
    stages = range(program.num_stages)

    def add_collectives(seconds: Sequence[float], point: StepPoint) -> list[float]:
        matching = [c for c in collectives if c.point is point]
        return [_seconds_with_collectives(matching, seconds[stage], stage=stage) for stage in stages]

    def stage_values(value: PerStage) -> list[float]:
        return [value_for_stage(value, stage) for stage in stages]

    weight_seconds, input_seconds = stage_values(costs.backward_weight), stage_values(costs.backward_input)
    backward = (
        [i + w for i, w in zip(input_seconds, weight_seconds, strict=True)]
        if costs.backward is None
        else stage_values(costs.backward)
    )
    with_communication = replace(
        costs,
        forward=add_collectives(stage_values(costs.forward), StepPoint.FORWARD),
        backward_input=add_collectives(input_seconds, StepPoint.BACKWARD),
        backward_weight=weight_seconds,
        backward=add_collectives(backward, StepPoint.BACKWARD),
    )
    return replace(with_communication, ready=_ready_times(program, costs=with_communication, collectives=collectives))


def slow_down_rank(program: Program, *, costs: Costs, rank: int, factor: float) -> Costs:
    """Return the costs with the computes of one rank multiplied by `factor`."""

    def slowed(value: PerStage) -> list[float]:
        return [
            value_for_stage(value, stage) * (factor if stage_rank == rank else 1)
            for stage, stage_rank in enumerate(program.rank_of_stage)
        ]

    return replace(
        costs,
        forward=slowed(costs.forward),
        backward_input=slowed(costs.backward_input),
        backward_weight=slowed(costs.backward_weight),
        backward=None if costs.backward is None else slowed(costs.backward),
        update=slowed(costs.update),
    )


def gradient_ready_time(
    collectives: Iterable[Collective], *, stage: int, start: float, stop: float, link_free_time: float
) -> float:
    """Return the time at which the gradients of a stage are reduced.

    The last backward of the stage runs from `start` to `stop`. The link is busy until `link_free_time`. The `overlap`
    fraction of each collective overlaps the backward, and the rest runs after it.
    """
    finish = link_free_time
    for collective in collectives:
        if collective.point is StepPoint.END:
            seconds = value_for_stage(collective.seconds, stage)
            finish = max(max(finish, start) + seconds, stop + (1 - collective.overlap) * seconds)
    return max(finish, stop)


def refuse_bad_numbers(program: Program, *, costs: Costs, collectives: Iterable[Collective]) -> None:
    """Check the times of all stages, and the overlaps of collectives.

    Raises:
        UsageError: a time is negative, not finite or missing, or an overlap is not between 0 and 1.
    """
    for name, value, count in _numbers_to_check(program, costs, collectives):
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


def _numbers_to_check(
    program: Program, costs: Costs, collectives: Iterable[Collective]
) -> Iterator[tuple[str, PerStage, int]]:
    """Yield the name and the value of each time, and how many numbers it must have if it is a sequence."""
    stages = program.num_stages
    for name in ("forward", "backward_input", "backward_weight", "update", "ready"):
        yield name, getattr(costs, name), stages
    if costs.backward is not None:
        yield "backward", costs.backward, stages
    yield "transfer", costs.transfer, stages - 1
    yield "latency", costs.latency, 0
    for collective in collectives:
        yield collective.name, collective.seconds, stages


def _seconds_with_collectives(collectives: Iterable[Collective], seconds: float, *, stage: int) -> float:
    """Return the time of a compute that takes `seconds` alone, with the collectives of its stage."""
    hidden = exposed = 0.0
    for collective in collectives:
        full_seconds = value_for_stage(collective.seconds, stage)
        hidden += collective.overlap * full_seconds
        exposed += (1 - collective.overlap) * full_seconds
    return max(seconds, hidden) + exposed


def _ready_times(program: Program, *, costs: Costs, collectives: Iterable[Collective]) -> list[float]:
    """Return the time at which each stage may begin its first forward.

    A rank runs the start collectives of its stages in the order of the stages. The first forward of a stage may overlap
    the last part of the collectives of this stage: at most the fraction that can overlap compute, and at most for as
    long as the forward takes.
    """
    start_collectives = [c for c in collectives if c.point is StepPoint.START]
    ready_times = [value_for_stage(costs.ready, stage) for stage in range(program.num_stages)]
    for rank in range(program.num_ranks):
        now = 0.0
        for stage in program.stages_of(rank):
            now += sum(value_for_stage(c.seconds, stage) for c in start_collectives)
            overlapped = sum(c.overlap * value_for_stage(c.seconds, stage) for c in start_collectives)
            first_forward = max(now - overlapped, now - value_for_stage(costs.forward, stage))
            ready_times[stage] = max(ready_times[stage], first_forward)
    return ready_times
