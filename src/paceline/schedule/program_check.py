"""Check that a program is complete, that each action comes after its inputs, and that there is no deadlock."""

from collections.abc import Iterator

from paceline.errors import LayoutError
from paceline.schedule.action_walk import Costs, WalkResult, walk_actions
from paceline.schedule.dependencies import find_rank_faults
from paceline.schedule.program import Action, Program
from paceline.schedule.schedule_error import ScheduleError, ScheduleFault


def check(program: Program) -> Program:
    """Return the program if it can be run.

    Raises:
        ScheduleError: the program has a fault. The error has the fault's position and the timeline.
        LayoutError: the numbers of stages, ranks and microbatches contradict each other.
    """
    _check_sizes(program)
    faults = [fault for rank in range(program.num_ranks) for fault in find_rank_faults(program, rank)]
    if faults:
        faults.sort(key=lambda fault: (fault.severity, not fault.action.op.is_compute))
        raise ScheduleError(program, faults[0], num_more=len(faults) - 1)
    walk = walk_actions(program, costs=Costs())
    if not walk.is_complete:
        raise ScheduleError(program, _deadlock_fault(program, walk))
    return program


def _check_sizes(program: Program) -> None:
    """Raise `LayoutError` if the sizes of the program's fields contradict each other."""
    ranks = program.rank_of_stage
    problem = ""
    if program.num_micro < 1 or program.num_stages < 1:
        problem = f"{program.num_stages} stages and {program.num_micro} microbatches: at least 1 of each is needed."
    elif len(ranks) != program.num_stages or len(program.actions) != program.num_ranks:
        problem = (
            f"{program.num_stages} stages and {program.num_ranks} ranks, but rank_of_stage has {len(ranks)} entries "
            f"and actions has {len(program.actions)}."
        )
    elif set(ranks) != set(range(program.num_ranks)):
        problem = (
            f"the stages are on ranks {sorted(set(ranks))}: each of the ranks 0 to {program.num_ranks - 1} needs a "
            "stage, and no other rank exists."
        )
    if problem:
        raise LayoutError(f"schedule {program.name!r}: {problem}")


def _deadlock_fault(program: Program, walk: WalkResult) -> ScheduleFault:
    """Return a fault that describes a deadlock: a cycle of ranks that wait for each other.

    Each rank of the cycle waits at a receive. The next rank would send this message only after the receive at which it
    waits itself.
    """
    cycle = list(_find_wait_cycle(program, walk))
    waiting = {rank: program.actions[rank][walk.num_finished[rank]] for rank in cycle}
    lines = []
    for rank, action in waiting.items():
        send_index = _find_send(program, action)
        sender = program.actions[action.peer or 0][send_index]
        lines.append(
            f"rank {rank} waits at {action} (action {walk.num_finished[rank] + 1}) "
            f"for {sender}, action {send_index + 1} of rank {action.peer}"
        )
    first = cycle[0]
    return ScheduleFault(
        rank=first,
        position=walk.num_finished[first],
        action=waiting[first],
        message=f"a deadlock: ranks {', '.join(map(str, sorted(cycle)))} wait for each other.",
        cause="; ".join(lines),
        other_positions=tuple((rank, walk.num_finished[rank]) for rank in cycle[1:]),
    )


def _find_wait_cycle(program: Program, walk: WalkResult) -> Iterator[int]:
    """Yield the ranks of a cycle in which each rank waits for a message from the next."""
    rank = next(r for r, row in enumerate(program.actions) if walk.num_finished[r] < len(row))
    visited: list[int] = []
    while rank not in visited:
        visited.append(rank)
        rank = program.actions[rank][walk.num_finished[rank]].peer or 0
    yield from visited[visited.index(rank) :]


def _find_send(program: Program, receive: Action) -> int:
    """Return the index of the send among the actions of its rank, for a receive."""
    row = program.actions[receive.peer or 0]
    return next(index for index, a in enumerate(row) if a.op.is_send and a.message == receive.message)
