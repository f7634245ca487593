"""Dependency rules for the actions of one rank that can be checked without the other ranks."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.schedule.lowering import messages_of
from paceline.schedule.program import Action, Op, Program
from paceline.schedule.schedule_error import ScheduleFault

Needs = dict[Action, list[Action]]


def faults_of_rank(program: Program, rank: int) -> Iterator[ScheduleFault]:
    """Yield one rank's faults: foreign or duplicate actions, then missing ones, then actions before their needs."""
    row = program.actions[rank]
    needs = needs_of_rank(program, rank)
    at: dict[Action, int] = {}
    for place, action in enumerate(row):
        if action not in needs:
            yield ScheduleFault(rank=rank, place=place, action=action, what=_why_foreign(program, rank, action))
        elif action in at:
            what = f"{action} appears twice, first as action {at[action] + 1}."
            yield ScheduleFault(rank=rank, place=place, action=action, what=what)
        else:
            at[action] = place
    needed_at = _first_need(needs, at) if len(at) < len(needs) else {}
    for action, before in needs.items():
        if action not in at:
            place = (
                needed_at[action] if action in needed_at else max((at[b] for b in before if b in at), default=len(row))
            )
            what = f"{action} is missing."
            yield ScheduleFault(rank=rank, place=place, action=action, what=what, cause=_WHY[action.op], severity=1)
    for action, before in needs.items():
        for first in before:
            if action in at and first in at and at[first] > at[action]:
                what = f"{action} comes before {first}, which it needs."
                yield ScheduleFault(rank=rank, place=at[action], action=action, what=what, severity=2)


def _first_need(needs: Needs, at: dict[Action, int]) -> dict[Action, int]:
    """Return, for each needed action, the first place of an action that needs it."""
    found: dict[Action, int] = {}
    for action, before in needs.items():
        for first in before if action in at else ():
            found[first] = min(at[action], found.get(first, at[action]))
    return found


def needs_of_rank(program: Program, rank: int) -> Needs:
    """Return every action that a rank must do, with those of its own actions that must come before it."""
    owner = program.rank_of_stage
    backward = _how_backward(program, rank)
    needs: Needs = {}
    for stage in program.stages_of(rank):
        for micro in range(program.num_micro):
            forward = Action(op=Op.FORWARD, stage=stage, microbatch=micro)
            before = [Action(op=Op.FORWARD, stage=stage - 1, microbatch=micro)] if stage else []
            _add(needs, forward, inner=before, owner=owner, rank=rank)
            if (back := backward.get((stage, micro))) is not None:
                _add(needs, back, inner=[b for b in [backward.get((stage + 1, micro))] if b], owner=owner, rank=rank)
                needs[back].insert(0, forward)
                if back.op is Op.INPUT:
                    needs[Action(op=Op.WEIGHT, stage=stage, microbatch=micro)] = [back]
        needs |= _steps(program, stage=stage, backward=backward)
    return needs


def _steps(program: Program, *, stage: int, backward: dict[tuple[int, int], Action]) -> Needs:
    """Return a stage's updates, each after the weight gradients of all microbatches since the previous update."""
    found: Needs = {}
    start = 0
    for last in program.updates:
        backs = [backward[stage, micro] for micro in range(start, last + 1) if (stage, micro) in backward]
        weights = [replace(back, op=Op.WEIGHT) if back.op is Op.INPUT else back for back in backs]
        found[Action(op=Op.UPDATE, stage=stage, microbatch=last)] = weights
        start = last + 1
    return found


def _add(needs: Needs, action: Action, *, inner: list[Action], owner: tuple[int, ...], rank: int) -> None:
    """Add a compute, its input (a message or the rank's own `inner` computes), and the message that it sends."""
    receive, send = messages_of(action, owner=owner)
    needs[action] = [before for before in inner if owner[before.stage] == rank]
    if receive is not None:
        needs[receive] = []
        needs[action] = [receive]
    if send is not None:
        needs[send] = [action]


def _how_backward(program: Program, rank: int) -> dict[tuple[int, int], Action]:
    """Return B for each stage and microbatch, or I if the rank's line splits that backward; empty without training."""
    if not program.trains:
        return {}
    row = program.actions[rank]
    whole = {(a.stage, a.microbatch) for a in row if a.op is Op.BACKWARD}
    split = {(a.stage, a.microbatch) for a in row if a.op in (Op.INPUT, Op.WEIGHT)} - whole
    return {
        (stage, micro): Action(op=Op.INPUT if (stage, micro) in split else Op.BACKWARD, stage=stage, microbatch=micro)
        for stage in program.stages_of(rank)
        for micro in range(program.num_micro)
    }


_WHY = {
    Op.FORWARD: "every microbatch goes forward through every stage once",
    Op.BACKWARD: "every microbatch goes backward through every stage once, as B or as I and later W",
    Op.INPUT: "W completes what I left",
    Op.WEIGHT: "without it the stage's weights get no gradient from this microbatch",
    Op.UPDATE: "every stage takes every step, otherwise its weights differ in version from other stages'",
    Op.SEND_F: "the next stage waits for this stage's output",
    Op.RECV_F: "the stage computes on the output of the previous stage",
    Op.SEND_B: "the previous stage waits for the gradient of its output",
    Op.RECV_B: "backward begins with the gradient that the next stage sends",
}


def _why_foreign(program: Program, rank: int, action: Action) -> str:
    if not 0 <= action.stage < program.num_stages:
        return f"{action}: there is no stage {action.stage}, they are 0 to {program.num_stages - 1}."
    if not 0 <= action.microbatch < program.num_micro:
        return f"{action}: there is no microbatch {action.microbatch}, they are 0 to {program.num_micro - 1}."
    if program.rank_of_stage[action.stage] != rank:
        return f"{action}: stage {action.stage} is on rank {program.rank_of_stage[action.stage]}."
    if action.op.is_compute:
        return f"{action} repeats what this line computes as {'B' if action.op is not Op.BACKWARD else 'I, W'}."
    return f"{action} is not a message that stage {action.stage} of these ranks sends or receives there."
