"""Simulation of a candidate's step in virtual time: the program of its schedule with its stages and messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.simulation.event_simulator import SimulatedStep, simulate_step
from paceline.planner.simulation.exposed_communication import STAGE_MESSAGES, exposed_seconds_by_name
from paceline.planner.simulation.overlap import Collective, StepPoint
from paceline.schedule.action_walk import Costs
from paceline.schedule.program import Program
from paceline.schedule.registry import build
from paceline.schedule.timeline import Timeline

EXPOSED_AXES = ("tensor", "context", "experts", "gather")
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class CandidateSimulation:
    """A simulated step of one candidate.

    `seconds` are those of the mean rank, by purpose, and sum to the step; `estimate` is the closed-form forecast.
    `flops` are the model FLOPs of all ranks, as MFU counts them.
    """

    estimate: Estimate
    seconds: dict[str, float]
    simulated_step: SimulatedStep
    samples: int
    length: int
    flops: float
    flops_per_second: float

    @property
    def step_seconds(self) -> float:
        """The seconds from the first rank's start until the last rank has its new weights."""
        return self.simulated_step.step_seconds

    @property
    def ranks(self) -> int:
        """The number of ranks, one per device."""
        return self.estimate.candidate.ranks

    @property
    def tokens(self) -> int:
        """The tokens of a step; the number of samples if these have no length."""
        return self.samples * self.length

    @property
    def mfu(self) -> float:
        """The model FLOPs as a fraction of the devices' peak in a step (Chowdhery et al., "PaLM", 2022)."""
        return self.flops / (self.step_seconds * self.ranks * self.flops_per_second)

    @property
    def bubble(self) -> float:
        """The fraction of the step that the schedule leaves idle."""
        return self.simulated_step.bubble

    @property
    def exposed(self) -> float:
        """The fraction of the step that communication adds."""
        return self.simulated_step.exposed

    @property
    def relative_difference(self) -> float:
        """The simulated step time relative to the closed-form forecast, minus 1."""
        return self.step_seconds / self.estimate.step_seconds - 1

    def as_json(self) -> dict[str, Any]:
        """Return the values by name, for scripts; `planned_seconds` are those of the closed forms."""
        estimate = self.estimate
        return {
            "layout": estimate.layout,
            "settings": estimate.settings,
            "ranks": self.ranks,
            "fits": estimate.fits,
            "tight": estimate.is_tight,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "planned_step_seconds": estimate.step_seconds,
            "planned_seconds": estimate.seconds.parts,
            "bubble": self.bubble,
            "exposed": self.exposed,
            "samples_per_second": self.samples / self.step_seconds,
            "tokens_per_second": self.tokens / self.step_seconds if self.length > 1 else None,
            "mfu": self.mfu,
        }

    @property
    def timeline(self) -> Timeline:
        """The timeline of one pipeline, from its first forward to its last backward."""
        return self.simulated_step.timeline


def simulate_candidate(cost_model: CostModel, *, candidate: Candidate) -> CandidateSimulation:
    """Simulate one step. Only the pipeline of one replica is simulated, so thousands of ranks take no longer.

    Raises:
        LayoutError: there are more stages than blocks.
    """
    c, estimate = candidate, cost_model.estimate(candidate)
    program = build(c.schedule, ranks=c.pp, micro=cost_model.num_micro(c), virtual=c.virtual)
    stage_times = [_stage_times(cost_model, c, place) for place in range(program.num_stages)]
    costs = Costs(
        forward=[one.forward for one in stage_times],
        input=[one.input for one in stage_times],
        weight=[one.weight for one in stage_times],
        transfer=cost_model.time_ratio(c.family) * cost_model.hop_seconds(c),
    )
    step_ends = _step_ends(cost_model, c, program)
    update = {name: max(end[name] for end in step_ends) for name in ("update", "offload", "start")}
    collectives = [
        *_message_collectives(stage_times),
        _gradient_collective(program, [end["gradients"] for end in step_ends]),
    ]
    simulated = simulate_step(
        program, costs=costs, collectives=collectives, replicas=c.replicas, ranks_per_stage=c.cp * c.tp,
        update_seconds=sum(update.values()),
    )  # fmt: skip
    num_micro = cost_model.num_micro(c)
    recompute = num_micro * sum(one.recompute for one in stage_times) / c.pp
    exposed = exposed_seconds_by_name(program, costs=costs, collectives=collectives)
    seconds = {"compute": simulated.compute_seconds - recompute - sum(update.values()), "again": recompute}
    seconds |= {name: exposed.get(name, 0.0) for name in (*EXPOSED_AXES, STAGE_MESSAGES)} | {
        "bubble": simulated.bubble_seconds
    }
    return CandidateSimulation(
        estimate=estimate,
        seconds={**seconds, "gradients": exposed["gradients"], **update},
        simulated_step=simulated,
        samples=cost_model.profile.global_batch_size,
        length=cost_model.profile.length,
        flops=cost_model.model_flops,
        flops_per_second=estimate.peak_flops_per_second,
    )


@dataclass(frozen=True, kw_only=True)
class _StageTimes:
    """The seconds of one microbatch in one stage.

    `input` includes the recomputation (`recompute`); `messages` are the forward and backward seconds by axis.
    """

    forward: float
    input: float
    weight: float
    recompute: float
    messages: dict[str, tuple[float, float]]


def _stage_times(cost_model: CostModel, c: Candidate, stage: int) -> _StageTimes:
    without_sharding, with_sharding = (
        cost_model.stages_without_sharding(c)[stage],
        cost_model.stages_with_sharding(c)[stage],
    )
    forward = backward = tensor = experts = 0.0
    for part, (count, work) in enumerate(zip(cost_model.part_counts(c)[stage], cost_model.layer_costs(c), strict=True)):
        if count:
            num_messages = 3 if c.remat == "full" and part > 1 else 2  # forward, backward, and a block's forward again
            forward += count * work.forward
            backward += count * (work.input + work.recompute)
            tensor += count * work.tensor / num_messages
            experts += count * work.experts / num_messages
    context, time_ratio = without_sharding.forward - forward - tensor - experts, cost_model.time_ratio(c.family)
    messages = {
        "tensor": (tensor, without_sharding.tensor - tensor),
        "context": (context, without_sharding.context - context),
        "experts": (experts, without_sharding.experts - experts),
        "gather": (with_sharding.forward - without_sharding.forward, with_sharding.input - without_sharding.input),
    }
    return _StageTimes(
        forward=time_ratio * forward,
        input=time_ratio * backward,
        weight=time_ratio * without_sharding.weight,
        recompute=time_ratio * without_sharding.again,
        messages={axis: (time_ratio * there, time_ratio * back) for axis, (there, back) in messages.items()},
    )


def _message_collectives(stage_times: list[_StageTimes]) -> Iterator[Collective]:
    """Yield the collectives of forward and backward. Their seconds already exclude what compute hides."""
    for axis in EXPOSED_AXES:
        for direction, point in enumerate((StepPoint.FORWARD, StepPoint.BACKWARD)):
            seconds = [max(0.0, one.messages[axis][direction]) for one in stage_times]
            if any(second > _ROUNDING * one.forward for second, one in zip(seconds, stage_times, strict=True)):
                yield Collective(name=axis, point=point, seconds=seconds)


def _step_ends(cost_model: CostModel, c: Candidate, program: Program) -> list[dict[str, float]]:
    counts, time_ratio = cost_model.part_counts(c), cost_model.time_ratio(c.family)
    seconds_by_stages = {
        own: {name: time_ratio * each for name, each in end.items()}
        for own, end in cost_model.step_end_seconds(c).items()
    }
    return [
        seconds_by_stages[tuple(counts[stage] for stage in sorted(program.stages_of(rank)))]
        for rank in range(program.num_ranks)
    ]


def _gradient_collective(program: Program, seconds: list[float]) -> Collective:
    """Return the gradient collective. The reduction of a rank begins when its first stage has finished its backward."""
    first_stage_seconds = {min(program.stages_of(rank)): each for rank, each in enumerate(seconds)}
    stage_seconds = [first_stage_seconds.get(stage, 0.0) for stage in range(program.num_stages)]
    return Collective(name="gradients", point=StepPoint.END, seconds=stage_seconds)
