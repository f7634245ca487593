"""Check a program, then simulate it in virtual time."""

from paceline.schedule.action_walk import Costs, walk_actions
from paceline.schedule.program import Program
from paceline.schedule.program_check import check
from paceline.schedule.timeline import Timeline


def simulate(program: Program, *, costs: Costs | None = None) -> Timeline:
    """Return the timeline of a program with these costs. By default F, I and W take 1 second each, and B takes 2.

    Raises:
        ScheduleError: the program is incomplete or deadlocks.
    """
    check(program)
    walk = walk_actions(program, costs=costs or Costs())
    return Timeline(name=program.name, num_ranks=program.num_ranks, spans=walk.spans)
