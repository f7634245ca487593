"""The exposed communication of a simulated step, by collective."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.planner.simulation.event_simulator import last_done
from paceline.planner.simulation.overlap import Collective, When, with_collectives
from paceline.schedule.action_walk import Costs, walk_actions
from paceline.schedule.program import Program

BORDERS = "borders"


def exposed_by_name(program: Program, *, costs: Costs, collectives: Sequence[Collective]) -> dict[str, float]:
    """Return the seconds each adds to the step: messages between stages (`borders`), then each name in turn.

    They sum to the time that the step would save if communication were free. The program must run to its end, which
    `simulate_step` ensures.
    """
    free = replace(costs, transfer=0.0, latency=0.0, ready=0.0)
    followed = walk_actions(program, costs=free)
    before, found, known = last_done([followed], ()), dict[str, float](), list[Collective]()
    for name in dict.fromkeys([BORDERS, *(one.name for one in collectives)]):
        own = [one for one in collectives if one.name == name]
        known += own
        if name == BORDERS or any(one.when is not When.END for one in own):
            followed = walk_actions(program, costs=with_collectives(program, costs=costs, collectives=known))
        now = last_done([followed], known)
        found[name], before = now - before, now
    return found
