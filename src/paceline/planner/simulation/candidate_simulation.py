"""Simulate one step of a candidate in virtual time. Stages and messages take the times of the cost model."""

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

COMMUNICATION_KINDS = ("tensor", "context", "experts", "gather")
"""The fields of `StepTime` that count messages of every microbatch."""
_ROUNDING = 1e-12  # collectives are left out if they take a smaller fraction of the forward


@dataclass(frozen=True, kw_only=True)
class CandidateSimulation:
    """A simulated step of one candidate."""

    estimate: Estimate
    """The forecast by closed forms."""
    seconds: dict[str, float]
    """The simulated seconds by purpose, averaged over the ranks; they sum to the step time."""
    simulated_step: SimulatedStep
    samples: int
    """The samples of a step."""
    length: int
    """The positions of a sample; 1 if samples have no length."""
    flops: float
    """The model FLOPs of a step over all ranks, as MFU counts them."""
    peak_flops_per_second: float
    """The peak rate of one device."""

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
        """The tokens of a step, or its samples if samples have no length."""
        return self.samples * self.length

    @property
    def mfu(self) -> float:
        """The model FLOPs of a step as a fraction of what all devices could compute at their peak rate in that time."""
        return self.flops / (self.step_seconds * self.ranks * self.peak_flops_per_second)

    @property
    def bubble(self) -> float:
        """The fraction of the step that the pipeline schedule leaves idle."""
        return self.simulated_step.bubble

    @property
    def exposed(self) -> float:
        """The fraction of the step that communication adds."""
        return self.simulated_step.exposed

    @property
    def relative_difference(self) -> float:
        """The relative difference of the simulated step time from the forecast by closed forms."""
        return self.step_seconds / self.estimate.step_seconds - 1

    def as_json(self) -> dict[str, Any]:
        """Return the values by name, for scripts. Names that begin with `planned` have the forecast by closed forms."""
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
    """Simulate one step.

    Only the pipeline of one replica is simulated, so this function takes no longer if there are more replicas.

    Raises:
        LayoutError: there are more stages than blocks.
    """
    c, estimate = candidate, cost_model.estimate(candidate)
    program = build(c.schedule, ranks=c.pp, micro=cost_model.num_micro(c), virtual=c.virtual)
    stage_times = [_stage_times(cost_model, c, stage) for stage in range(program.num_stages)]
    costs = Costs(
        forward=[times.forward for times in stage_times],
        backward_input=[times.backward_input for times in stage_times],
        backward_weight=[times.backward_weight for times in stage_times],
        transfer=cost_model.time_ratio(c.family) * cost_model.hop_seconds(c),
    )
    rank_ends = _end_seconds_by_rank(cost_model, c, program)
    # `start` is the fixed cost of a step
    end_seconds = {name: max(end[name] for end in rank_ends) for name in ("update", "offload", "start")}
    collectives = [
        *_message_collectives(stage_times),
        _gradient_collective(program, [end["gradients"] for end in rank_ends]),
    ]
    simulated = simulate_step(
        program, costs=costs, collectives=collectives, replicas=c.replicas, ranks_per_stage=c.cp * c.tp,
        update_seconds=sum(end_seconds.values()),
    )  # fmt: skip
    num_micro = cost_model.num_micro(c)
    recompute = num_micro * sum(times.recompute for times in stage_times) / c.pp
    exposed = exposed_seconds_by_name(program, costs=costs, collectives=collectives)
    seconds = {"compute": simulated.compute_seconds - recompute - sum(end_seconds.values()), "again": recompute}
    seconds |= {name: exposed.get(name, 0.0) for name in (*COMMUNICATION_KINDS, STAGE_MESSAGES)} | {
        "bubble": simulated.bubble_seconds
    }
    return CandidateSimulation(
        estimate=estimate,
        seconds={**seconds, "gradients": exposed["gradients"], **end_seconds},
        simulated_step=simulated,
        samples=cost_model.profile.global_batch_size,
        length=cost_model.profile.length,
        flops=cost_model.model_flops,
        peak_flops_per_second=estimate.peak_flops_per_second,
    )


@dataclass(frozen=True, kw_only=True)
class _StageTimes:
    """The seconds of one microbatch in one stage. Only `messages` counts messages."""

    forward: float
    backward_input: float
    """Backward for inputs, with the recomputation."""
    backward_weight: float
    recompute: float
    """Recomputation."""
    messages: dict[str, tuple[float, float]]
    """Exposed messages in (forward, backward), by `COMMUNICATION_KINDS`."""


def _stage_times(cost_model: CostModel, c: Candidate, stage: int) -> _StageTimes:
    """Return the cost model's times of a stage, separated into compute and messages."""
    without_sharding, with_sharding = (
        cost_model.stages_without_sharding(c)[stage],
        cost_model.stages_with_sharding(c)[stage],
    )
    forward = backward = tensor = experts = 0.0
    for part, (count, cost) in enumerate(zip(cost_model.part_counts(c)[stage], cost_model.layer_costs(c), strict=True)):
        if count:
            is_block = part >= 2  # parts 0 and 1 are those before and after the blocks
            # the passes are forward, backward and, with full remat, the recomputed forward of a block
            num_passes = 3 if c.remat == "full" and is_block else 2
            forward += count * cost.forward
            backward += count * (cost.backward_input + cost.recompute)
            tensor += count * cost.tensor / num_passes
            experts += count * cost.experts / num_passes
    context, time_ratio = without_sharding.forward - forward - tensor - experts, cost_model.time_ratio(c.family)
    messages = {
        "tensor": (tensor, without_sharding.tensor - tensor),
        "context": (context, without_sharding.context - context),
        "experts": (experts, without_sharding.experts - experts),
        "gather": (
            with_sharding.forward - without_sharding.forward,
            with_sharding.backward_input - without_sharding.backward_input,
        ),
    }
    return _StageTimes(
        forward=time_ratio * forward,
        backward_input=time_ratio * backward,
        backward_weight=time_ratio * without_sharding.backward_weight,
        recompute=time_ratio * without_sharding.recompute,
        messages={kind: (time_ratio * fwd, time_ratio * bwd) for kind, (fwd, bwd) in messages.items()},
    )


def _message_collectives(stage_times: list[_StageTimes]) -> Iterator[Collective]:
    """Yield the collectives of forward and backward. They do not overlap compute: their seconds are exposed ones."""
    for kind in COMMUNICATION_KINDS:
        for direction, point in enumerate((StepPoint.FORWARD, StepPoint.BACKWARD)):
            seconds = [max(0.0, times.messages[kind][direction]) for times in stage_times]
            if any(s > _ROUNDING * times.forward for s, times in zip(seconds, stage_times, strict=True)):
                yield Collective(name=kind, point=point, seconds=seconds)


def _end_seconds_by_rank(cost_model: CostModel, c: Candidate, program: Program) -> list[dict[str, float]]:
    """Return, for each pipeline rank, the seconds of the work that it does once per step, by field of `StepTime`."""
    counts, time_ratio = cost_model.part_counts(c), cost_model.time_ratio(c.family)
    seconds_by_stages = {
        stages: {name: time_ratio * seconds for name, seconds in end.items()}
        for stages, end in cost_model.step_end_seconds(c).items()
    }
    return [
        seconds_by_stages[tuple(counts[stage] for stage in sorted(program.stages_of(rank)))]
        for rank in range(program.num_ranks)
    ]


def _gradient_collective(program: Program, seconds: list[float]) -> Collective:
    """Return the collective that reduces gradients, from the `seconds` that it takes on each pipeline rank.

    On each rank, it begins when the rank's first stage has finished its backward.
    """
    first_stage_seconds = {min(program.stages_of(rank)): rank_seconds for rank, rank_seconds in enumerate(seconds)}
    stage_seconds = [first_stage_seconds.get(stage, 0.0) for stage in range(program.num_stages)]
    return Collective(name="gradients", point=StepPoint.END, seconds=stage_seconds)
