"""Simulation of a candidate's step in virtual time: its schedule's program with its own stages and messages."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.simulation.event_simulator import SimulatedStep, simulate_step
from paceline.planner.simulation.exposed_communication import BORDERS, exposed_by_name
from paceline.planner.simulation.overlap import Collective, When
from paceline.schedule.action_walk import Costs
from paceline.schedule.program import Program
from paceline.schedule.registry import build
from paceline.schedule.timeline import Timeline

AXES = ("tensor", "context", "experts", "gather")
_ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class CandidateSimulation:
    """A simulated step of one candidate.

    `seconds` are a mean rank's, by purpose, and sum to the step; `estimate` is the closed-form forecast. `flops` are
    the model FLOPs of all ranks, as MFU counts them.
    """

    estimate: Estimate
    seconds: dict[str, float]
    rehearsal: SimulatedStep
    samples: int
    length: int
    flops: float
    flops_per_second: float

    @property
    def step_seconds(self) -> float:
        """The seconds from the first rank's start until the last rank has its new weights."""
        return self.rehearsal.step_seconds

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
        return self.rehearsal.bubble

    @property
    def exposed(self) -> float:
        """The fraction of the step that communication adds."""
        return self.rehearsal.exposed

    @property
    def off(self) -> float:
        """The simulated step time relative to the closed-form forecast, minus 1."""
        return self.step_seconds / self.estimate.step_seconds - 1

    def as_json(self) -> dict[str, Any]:
        """Return the values by name, for scripts; `planned_seconds` are those of the closed forms."""
        found = self.estimate
        return {
            "layout": found.layout,
            "settings": found.settings,
            "ranks": self.ranks,
            "fits": found.fits,
            "tight": found.is_tight,
            "step_seconds": self.step_seconds,
            "seconds": self.seconds,
            "planned_step_seconds": found.step_seconds,
            "planned_seconds": found.seconds.parts,
            "bubble": self.bubble,
            "exposed": self.exposed,
            "samples_per_second": self.samples / self.step_seconds,
            "tokens_per_second": self.tokens / self.step_seconds if self.length > 1 else None,
            "mfu": self.mfu,
        }

    @property
    def timeline(self) -> Timeline:
        """The timeline of one pipeline, from its first forward to its last backward."""
        return self.rehearsal.timeline


def simulate_candidate(forecast: CostModel, *, candidate: Candidate) -> CandidateSimulation:
    """Simulate one step. Only one replica's pipeline is simulated, so thousands of ranks take no longer.

    Raises:
        LayoutError: there are more stages than blocks.
    """
    c, estimate = candidate, forecast.estimate(candidate)
    program = build(c.schedule, ranks=c.pp, micro=forecast.num_micro(c), virtual=c.virtual)
    passes = [_passes(forecast, c, place) for place in range(program.num_stages)]
    costs = Costs(
        forward=[one.forward for one in passes],
        input=[one.input for one in passes],
        weight=[one.weight for one in passes],
        transfer=forecast.longer(c.family) * forecast.hop_seconds(c),
    )
    ends = _ends(forecast, c, program)
    update = {name: max(end[name] for end in ends) for name in ("update", "offload", "start")}
    collectives = [*_messages(passes), _gradients(program, [end["gradients"] for end in ends])]
    found = simulate_step(
        program, costs=costs, collectives=collectives, replicas=c.replicas, ranks_a_stage=c.cp * c.tp,
        update_seconds=sum(update.values()),
    )  # fmt: skip
    micro = forecast.num_micro(c)
    again = micro * sum(one.again for one in passes) / c.pp
    exposed = exposed_by_name(program, costs=costs, collectives=collectives)
    seconds = {"compute": found.compute_seconds - again - sum(update.values()), "again": again}
    seconds |= {name: exposed.get(name, 0.0) for name in (*AXES, BORDERS)} | {"bubble": found.bubble_seconds}
    return CandidateSimulation(
        estimate=estimate,
        seconds={**seconds, "gradients": exposed["gradients"], **update},
        rehearsal=found,
        samples=forecast.facts.global_batch_size,
        length=forecast.facts.length,
        flops=forecast.model_flops,
        flops_per_second=estimate.peak_flops_per_second,
    )


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """The seconds of one microbatch in one stage.

    `input` includes recomputation (`again`); `messages` are the forward and backward seconds by axis.
    """

    forward: float
    input: float
    weight: float
    again: float
    messages: dict[str, tuple[float, float]]


def _passes(forecast: CostModel, c: Candidate, place: int) -> _Passes:
    alone, whole = forecast.stages(c)[place], forecast.all_stages(c)[place]
    forward = back = tensor = experts = 0.0
    for part, (count, work) in enumerate(zip(forecast.counts(c)[place], forecast.works(c), strict=True)):
        if count:
            times = 3 if c.remat == "full" and part > 1 else 2  # forward, backward, and a block's forward again
            forward += count * work.forward
            back += count * (work.input + work.again)
            tensor += count * work.tensor / times
            experts += count * work.experts / times
    context, longer = alone.forward - forward - tensor - experts, forecast.longer(c.family)
    messages = {
        "tensor": (tensor, alone.tensor - tensor),
        "context": (context, alone.context - context),
        "experts": (experts, alone.experts - experts),
        "gather": (whole.forward - alone.forward, whole.input - alone.input),
    }
    return _Passes(
        forward=longer * forward,
        input=longer * back,
        weight=longer * alone.weight,
        again=longer * alone.again,
        messages={axis: (longer * there, longer * back) for axis, (there, back) in messages.items()},
    )


def _messages(passes: list[_Passes]) -> Iterator[Collective]:
    """Yield the collectives of the passes. The forecast's seconds already exclude what compute hides."""
    for axis in AXES:
        for place, when in enumerate((When.FORWARD, When.BACKWARD)):
            seconds = [max(0.0, one.messages[axis][place]) for one in passes]
            if any(second > _ROUNDING * one.forward for second, one in zip(seconds, passes, strict=True)):
                yield Collective(name=axis, when=when, seconds=seconds)


def _ends(forecast: CostModel, c: Candidate, program: Program) -> list[dict[str, float]]:
    counts, longer = forecast.counts(c), forecast.longer(c.family)
    ends = {own: {name: longer * each for name, each in end.items()} for own, end in forecast.ends(c).items()}
    return [
        ends[tuple(counts[stage] for stage in sorted(program.stages_of(rank)))] for rank in range(program.num_ranks)
    ]


def _gradients(program: Program, seconds: list[float]) -> Collective:
    """Return the gradient collective: a rank's reduction begins when its first stage has finished its backward."""
    first = {min(program.stages_of(rank)): each for rank, each in enumerate(seconds)}
    each = [first.get(stage, 0.0) for stage in range(program.num_stages)]
    return Collective(name="gradients", when=When.END, seconds=each)
