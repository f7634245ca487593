"""A candidate's pipeline on virtual time: its schedule's own program with its own stages, for pictures."""

from paceline.errors import LayoutError
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.schedule.action_walk import Costs
from paceline.schedule.program_simulation import simulate
from paceline.schedule.registry import build
from paceline.schedule.timeline import Timeline


def pipeline_timeline(forecast: CostModel, *, candidate: Candidate) -> Timeline:
    """Who does what when, from the first forward to the last backward: what `makespan` gives in one number.

    Takes about 20 microseconds an action: ranks × microbatches × stages a rank × 4 of them.

    Raises:
        LayoutError: there is no pipeline.
    """
    if candidate.pp == 1:
        raise LayoutError(f"{candidate.layout} has no pipeline to follow.", hint="a layout with pp")
    program = build(
        candidate.schedule, ranks=candidate.pp, micro=forecast.num_micro(candidate), virtual=candidate.virtual
    )
    return simulate(program, costs=costs_of(forecast, candidate=candidate))


def costs_of(forecast: CostModel, *, candidate: Candidate) -> Costs:
    """Seconds of every stage and of a message between two, for `schedule.simulate`."""
    stages = forecast.all_stages(candidate)
    return Costs(
        forward=[stage.forward for stage in stages],
        input=[stage.input for stage in stages],
        weight=[stage.weight for stage in stages],
        transfer=forecast.hop_seconds(candidate),
    )
