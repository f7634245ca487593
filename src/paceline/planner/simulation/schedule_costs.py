"""A candidate's pipeline in virtual time, for pictures: its schedule's program with its own stages."""

from paceline.errors import LayoutError
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.schedule.action_walk import Costs
from paceline.schedule.program_simulation import simulate
from paceline.schedule.registry import build
from paceline.schedule.timeline import Timeline


def pipeline_timeline(forecast: CostModel, *, candidate: Candidate) -> Timeline:
    """Return the timeline from the first forward to the last backward, which `makespan` sums up in one number.

    This takes about 20 microseconds per action, of which there are ranks × microbatches × stages per rank × 4.

    Raises:
        LayoutError: the candidate has no pipeline.
    """
    if candidate.pp == 1:
        raise LayoutError(f"{candidate.layout} has no pipeline.", hint="use a layout with pp")
    program = build(
        candidate.schedule, ranks=candidate.pp, micro=forecast.num_micro(candidate), virtual=candidate.virtual
    )
    return simulate(program, costs=costs_of(forecast, candidate=candidate))


def costs_of(forecast: CostModel, *, candidate: Candidate) -> Costs:
    """Return the seconds of every stage and of a message between two, for `program_simulation.simulate`."""
    stages = forecast.all_stages(candidate)
    return Costs(
        forward=[stage.forward for stage in stages],
        input=[stage.input for stage in stages],
        weight=[stage.weight for stage in stages],
        transfer=forecast.hop_seconds(candidate),
    )
