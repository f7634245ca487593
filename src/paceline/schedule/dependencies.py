"""Check one rank's actions, without the other ranks: none is missing or extra, and each comes after its inputs."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.schedule.lowering import find_messages
from paceline.schedule.program import Action, Op, Program
from paceline.schedule.schedule_error import ScheduleFault

Requirements = dict[Action, list[Action]]  # each action, with the actions of its rank that must run before it


def find_rank_faults(program: Program, rank: int) -> Iterator[ScheduleFault]:
    """Yield one rank's faults: foreign or duplicate actions, then missing ones, then actions before their inputs."""
    row = program.actions[rank]
    requirements = find_requirements(program, rank)
    positions: dict[Action, int] = {}
    for position, action in enumerate(row):
        if action not in requirements:
            yield ScheduleFault(
                rank=rank, position=position, action=action, message=_foreign_action_text(program, rank, action)
            )
        elif action in positions:
            message = f"{action} appears twice, first as action {positions[action] + 1}."
            yield ScheduleFault(rank=rank, position=position, action=action, message=message)
        else:
            positions[action] = position
    first_uses = _first_uses(requirements, positions) if len(positions) < len(requirements) else {}
    for action, predecessors in requirements.items():
        if action not in positions:
            position = (
                first_uses[action]
                if action in first_uses
                else max((positions[before] for before in predecessors if before in positions), default=len(row))
            )
            message = f"{action} is missing."
            yield ScheduleFault(
                rank=rank,
                position=position,
                action=action,
                message=message,
                cause=_MISSING_CAUSES[action.op],
                severity=1,
            )
    for action, predecessors in requirements.items():
        for predecessor in predecessors:
            if action in positions and predecessor in positions and positions[predecessor] > positions[action]:
                message = f"{action} comes before {predecessor}, which it needs."
                yield ScheduleFault(rank=rank, position=positions[action], action=action, message=message, severity=2)


def _first_uses(requirements: Requirements, positions: dict[Action, int]) -> dict[Action, int]:
    """Return, for each required action, the position of the first action that needs it."""
    first_uses: dict[Action, int] = {}
    for action, predecessors in requirements.items():
        for predecessor in predecessors if action in positions else ():
            first_uses[predecessor] = min(positions[action], first_uses.get(predecessor, positions[action]))
    return first_uses


def find_requirements(program: Program, rank: int) -> Requirements:
    """Return every action that a rank must run, each with the actions of this rank that must come before it."""
    rank_of_stage = program.rank_of_stage
    backward = _backward_actions(program, rank)
    requirements: Requirements = {}
    for stage in program.stages_of(rank):
        for micro in range(program.num_micro):
            forward = Action(op=Op.FORWARD, stage=stage, microbatch=micro)
            inputs = [Action(op=Op.FORWARD, stage=stage - 1, microbatch=micro)] if stage else []
            _add_requirement(requirements, forward, local_inputs=inputs, rank_of_stage=rank_of_stage, rank=rank)
            if (backward_action := backward.get((stage, micro))) is not None:
                _add_requirement(
                    requirements,
                    backward_action,
                    local_inputs=[b for b in [backward.get((stage + 1, micro))] if b],
                    rank_of_stage=rank_of_stage,
                    rank=rank,
                )
                requirements[backward_action].insert(0, forward)
                if backward_action.op is Op.BACKWARD_INPUT:
                    requirements[Action(op=Op.BACKWARD_WEIGHT, stage=stage, microbatch=micro)] = [backward_action]
        requirements |= _update_requirements(program, stage=stage, backward=backward)
    return requirements


def _update_requirements(program: Program, *, stage: int, backward: dict[tuple[int, int], Action]) -> Requirements:
    """Return a stage's updates, each with the weight gradients of all microbatches since the previous update."""
    requirements: Requirements = {}
    start = 0
    for last in program.update_microbatches:
        backwards = [backward[stage, micro] for micro in range(start, last + 1) if (stage, micro) in backward]
        weight_gradients = [
            replace(back, op=Op.BACKWARD_WEIGHT) if back.op is Op.BACKWARD_INPUT else back for back in backwards
        ]
        requirements[Action(op=Op.UPDATE, stage=stage, microbatch=last)] = weight_gradients
        start = last + 1
    return requirements


def _add_requirement(
    requirements: Requirements, action: Action, *, local_inputs: list[Action], rank_of_stage: tuple[int, ...], rank: int
) -> None:
    """Add a compute with the message that it sends and the action that it needs.

    The compute needs the message with its input or, without a message, those of `local_inputs` that run on this rank.
    """
    receive, send = find_messages(action, rank_of_stage=rank_of_stage)
    requirements[action] = [predecessor for predecessor in local_inputs if rank_of_stage[predecessor.stage] == rank]
    if receive is not None:
        requirements[receive] = []
        requirements[action] = [receive]
    if send is not None:
        requirements[send] = [action]


def _backward_actions(program: Program, rank: int) -> dict[tuple[int, int], Action]:
    """Return the backward of each (stage, microbatch): B, or I if the rank splits it.

    Return an empty dictionary for a program without backward.
    """
    if not program.has_backward:
        return {}
    row = program.actions[rank]
    unsplit = {(a.stage, a.microbatch) for a in row if a.op is Op.BACKWARD}
    split = {(a.stage, a.microbatch) for a in row if a.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)} - unsplit
    return {
        (stage, micro): Action(
            op=Op.BACKWARD_INPUT if (stage, micro) in split else Op.BACKWARD, stage=stage, microbatch=micro
        )
        for stage in program.stages_of(rank)
        for micro in range(program.num_micro)
    }


_MISSING_CAUSES = {
    Op.FORWARD: "every microbatch goes forward through every stage once",
    Op.BACKWARD: "every microbatch goes backward through every stage once, as B or as I and later W",
    Op.BACKWARD_INPUT: "W computes the weight gradients after I",
    Op.BACKWARD_WEIGHT: "without W the stage's weights get no gradient from this microbatch",
    Op.UPDATE: "every stage runs every update; otherwise the stages would have different weight versions",
    Op.SEND_F: "the next stage waits for this stage's output",
    Op.RECV_F: "the stage computes on the output of the previous stage",
    Op.SEND_B: "the previous stage waits for the gradient of its output",
    Op.RECV_B: "backward begins with the gradient that the next stage sends",
}


def _foreign_action_text(program: Program, rank: int, action: Action) -> str:
    if not 0 <= action.stage < program.num_stages:
        return f"{action}: there is no stage {action.stage}; the stages are 0 to {program.num_stages - 1}."
    if not 0 <= action.microbatch < program.num_micro:
        return f"{action}: there is no microbatch {action.microbatch}; the last one is {program.num_micro - 1}."
    if program.rank_of_stage[action.stage] != rank:
        return f"{action}: stage {action.stage} is on rank {program.rank_of_stage[action.stage]}."
    if action.op.is_compute:
        return (
            f"{action}: this rank's line already has the backward as {'I and W' if action.op is Op.BACKWARD else 'B'}."
        )
    return f"{action} is not a message between stage {action.stage} and a neighbouring stage on another rank."
