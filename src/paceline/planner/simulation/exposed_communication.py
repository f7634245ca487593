"""Compute how much each kind of communication adds to a simulated step."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.planner.simulation.event_simulator import finish_time
from paceline.planner.simulation.overlap import Collective, StepPoint, with_collectives
from paceline.schedule.action_walk import Costs, walk_actions
from paceline.schedule.program import Program

STAGE_MESSAGES = "borders"  # the messages between stages, as a key of the simulation's JSON


def exposed_seconds_by_name(program: Program, *, costs: Costs, collectives: Sequence[Collective]) -> dict[str, float]:
    """Return the seconds that messages between stages (`borders`) and collectives add to the step, by name.

    The messages are added to the simulation first, then the collectives in their order, one name at a time. The seconds
    sum to the time that the step would save if communication took no time. The program must be valid, as for
    `simulate_step`.
    """
    free_costs = replace(costs, transfer=0.0, latency=0.0, ready=0.0)
    walk = walk_actions(program, costs=free_costs)
    previous, exposed, included = finish_time([walk], ()), dict[str, float](), list[Collective]()
    for name in dict.fromkeys([STAGE_MESSAGES, *(collective.name for collective in collectives)]):
        same_name = [collective for collective in collectives if collective.name == name]
        included += same_name
        if name == STAGE_MESSAGES or any(collective.point is not StepPoint.END for collective in same_name):
            walk = walk_actions(program, costs=with_collectives(program, costs=costs, collectives=included))
        finish = finish_time([walk], included)
        exposed[name], previous = finish - previous, finish
    return exposed
