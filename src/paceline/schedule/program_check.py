"""Checks that a program, built in or a user's own, is complete, in order and free of deadlock."""

from collections.abc import Iterator

from paceline.errors import LayoutError
from paceline.schedule.action_walk import Costs, WalkResult, walk_actions
from paceline.schedule.dependencies import faults_of_rank
from paceline.schedule.program import Action, Program
from paceline.schedule.schedule_error import ScheduleError, ScheduleFault


def check(program: Program) -> Program:
    """Return the program if it can be run.

    Raises:
        ScheduleError: the first fault, with its place and the timeline.
    """
    _check_frame(program)
    faults = [fault for rank in range(program.num_ranks) for fault in faults_of_rank(program, rank)]
    if faults:
        faults.sort(key=lambda found: (found.severity, not found.action.op.is_compute))
        raise ScheduleError(program, faults[0], more=len(faults) - 1)
    followed = walk_actions(program, costs=Costs())
    if not followed.is_whole:
        raise ScheduleError(program, _deadlock(program, followed))
    return program


def _check_frame(program: Program) -> None:
    """Raise `LayoutError` if the numbers of ranks, stages, owners and lines contradict each other."""
    owner = program.rank_of_stage
    wrong = ""
    if program.num_micro < 1 or program.num_stages < 1:
        wrong = f"{program.num_stages} stages and {program.num_micro} microbatches: at least 1 of each is needed."
    elif len(owner) != program.num_stages or len(program.actions) != program.num_ranks:
        wrong = (
            f"{program.num_stages} stages and {program.num_ranks} ranks, but places for {len(owner)} stages "
            f"and lines for {len(program.actions)} ranks."
        )
    elif set(owner) != set(range(program.num_ranks)):
        wrong = (
            f"stages are on ranks {sorted(set(owner))} of {program.num_ranks}: every rank needs a stage, "
            "and no other rank exists."
        )
    if wrong:
        raise LayoutError(f"schedule {program.name!r}: {wrong}")


def _deadlock(program: Program, followed: WalkResult) -> ScheduleFault:
    """Return the fault of a deadlock: ranks that wait for each other in a circle.

    Each waits at a receive whose send comes later in the line of the next rank.
    """
    circle = list(_circle(program, followed))
    stands = {rank: program.actions[rank][followed.reached[rank]] for rank in circle}
    lines = []
    for rank, action in stands.items():
        place = _send_of(program, action)
        sender = program.actions[action.peer or 0][place]
        lines.append(
            f"rank {rank} waits at {action} (action {followed.reached[rank] + 1}) "
            f"for {sender}, action {place + 1} of rank {action.peer}"
        )
    first = circle[0]
    return ScheduleFault(
        rank=first,
        place=followed.reached[first],
        action=stands[first],
        what=f"a deadlock: ranks {', '.join(map(str, sorted(circle)))} wait for each other.",
        cause="; ".join(lines),
        others=tuple((rank, followed.reached[rank]) for rank in circle[1:]),
    )


def _circle(program: Program, followed: WalkResult) -> Iterator[int]:
    rank = next(r for r, row in enumerate(program.actions) if followed.reached[r] < len(row))
    met: list[int] = []
    while rank not in met:
        met.append(rank)
        rank = program.actions[rank][followed.reached[rank]].peer or 0
    yield from met[met.index(rank) :]


def _send_of(program: Program, receive: Action) -> int:
    row = program.actions[receive.peer or 0]
    return next(place for place, a in enumerate(row) if a.op.is_send and a.message == receive.message)
