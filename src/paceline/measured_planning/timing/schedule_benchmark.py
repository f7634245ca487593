"""Measure the schedule of a pipeline, and simulate the same schedule with the measured compute times."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.schedule.action_walk import Costs
from paceline.schedule.program import Action, Op, Program
from paceline.schedule.program_simulation import simulate
from paceline.schedule.program_svg import draw
from paceline.schedule.timeline import Span, Timeline
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.trainer.session import Session

STEPS = 3
_MS = 1e3
_RecordedActions = list[list[Any]]  # of one rank in one step: operation, stage, microbatch, start and stop in ms


@dataclass(frozen=True, kw_only=True)
class MeasuredSchedule:
    """The measured bubble fraction, and the fraction `planned` for stages of equal length.

    `picture` is an SVG of one measured step, and of the same step simulated with the measured times.
    """

    bubble: float
    planned: float
    picture: str


def measure_schedule(session: Session, batches: Iterator[Any]) -> MeasuredSchedule | None:
    """Record a few steps. Return the step whose bubble is the median. Every rank calls this.

    Rank 0 gets the result. Other ranks get None, and so do all ranks if there is no pipeline. All ranks are processes
    of one machine, so `time.perf_counter` is the same clock for all.
    """
    forward_backward, world = session.setup.step.forward_backward, session.world
    if not isinstance(forward_backward, PipelineForwardBackward):
        return None
    steps: list[_RecordedActions] = []
    for _ in range(STEPS):
        actions: _RecordedActions = []

        def record_action(action: Action, start: float, stop: float, actions: _RecordedActions = actions) -> None:
            if action.op.is_compute:
                actions.append([str(action.op), action.stage, action.microbatch, start * _MS, stop * _MS])

        with forward_backward.observe_actions(record_action):
            session.loop.step(next(batches))
        steps.append(actions)
    steps_by_rank = world.gather_json(steps)
    if not world.is_main:
        return None
    pipeline_ranks = session.prepared_job.plan.mesh.group(world.rank, axes=("pp",))
    return median_schedule(
        [[steps_by_rank[rank][step] for rank in pipeline_ranks] for step in range(STEPS)], forward_backward
    )


def median_schedule(
    steps: Sequence[Sequence[_RecordedActions]], forward_backward: PipelineForwardBackward
) -> MeasuredSchedule | None:
    """Return the step with the median bubble; None if there are no actions.

    `steps` has, for each step, the recorded actions of every pipeline rank.
    """
    num_micro = 1 + max((action[2] for step in steps for rank in step for action in rank), default=-1)
    if not num_micro:
        return None
    program = forward_backward.program(num_micro)
    timelines = sorted(
        (build_timeline(step, name=f"{program.name} as measured") for step in steps), key=lambda t: t.bubble
    )
    median_timeline = timelines[len(timelines) // 2]
    planned = simulate(program, costs=median_costs(median_timeline, program))
    planned_timeline = Timeline(
        name=f"{program.name} as planned with these times", num_ranks=planned.num_ranks, spans=planned.spans
    )
    picture = draw(planned_timeline, measured=median_timeline, unit="ms")
    return MeasuredSchedule(bubble=median_timeline.bubble, planned=simulate(program).bubble, picture=picture)


def build_timeline(ranks: Sequence[_RecordedActions], *, name: str) -> Timeline:
    """Return the timeline of the recorded actions of every pipeline rank. Time 0 is the start of the first action."""
    start_time = min(action[3] for rank in ranks for action in rank)
    spans = [
        Span(
            rank=pipeline_rank,
            action=Action(op=Op(op), stage=stage, microbatch=micro),
            start=start - start_time,
            stop=stop - start_time,
        )
        for pipeline_rank, actions in enumerate(ranks)
        for op, stage, micro, start, stop in actions
    ]
    return Timeline(name=name, num_ranks=len(ranks), spans=tuple(spans))


def median_costs(measured: Timeline, program: Program) -> Costs:
    """Return the median time of each operation at each stage, in the unit of `measured`. Messages take no time."""

    def median_durations(op: Op) -> list[float]:
        durations: list[list[float]] = [[] for _ in range(program.num_stages)]
        for span in measured.compute_spans:
            if span.action.op is op:
                durations[span.action.stage].append(span.seconds)  # in ms if the spans are in ms
        return [median(stage_durations) if stage_durations else 0.0 for stage_durations in durations]

    has_full_backward = any(span.action.op is Op.BACKWARD for span in measured.compute_spans)
    return Costs(
        forward=median_durations(Op.FORWARD),
        backward_input=median_durations(Op.BACKWARD_INPUT),
        backward_weight=median_durations(Op.BACKWARD_WEIGHT),
        backward=median_durations(Op.BACKWARD) if has_full_backward else None,
    )
