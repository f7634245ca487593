"""The error for a program with a fault. It has the position of the fault and a picture of the timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from paceline.errors import LayoutError
from paceline.schedule.action_walk import Costs, walk_actions
from paceline.schedule.program import Action, Op, Program
from paceline.schedule.text_timeline import draw_marked_panel


@dataclass(frozen=True, kw_only=True)
class ScheduleFault:
    """A fault in a program. `position` is an index in the rank's actions, or their number for a fault at the end."""

    rank: int
    position: int
    action: Action  # is duplicate, missing, too early or waiting, or does not belong to this rank
    message: str
    cause: str = ""
    severity: int = 0  # 0: extra action, 1: missing, 2: too early; a fault of the lowest severity is reported
    other_positions: tuple[tuple[int, int], ...] = ()  # further (rank, position) pairs to mark


class ScheduleError(LayoutError):
    """The error for a pipeline program that can't be run: it is incomplete, out of order, or deadlocks."""

    def __init__(self, program: Program, fault: ScheduleFault, *, num_more: int = 0) -> None:
        row = program.actions[fault.rank] if fault.rank < len(program.actions) else ()
        position = (
            f"action {fault.position + 1} of {len(row)}: {row[fault.position]}"
            if fault.position < len(row)
            else "at the end"
        )
        more_note = f" (1 of {num_more + 1} faults)" if num_more else ""
        super().__init__(
            f"schedule {program.name!r}: {fault.message}{more_note}",
            where=f"rank {fault.rank}, {position}",
            cause=fault.cause,
            hint="fix that rank's line; `paceline.schedule.build` returns valid orders",
        )
        self.fault = fault
        self.timeline = draw_schedule_text(
            program, marked_positions={fault.rank: fault.position, **dict(fault.other_positions)}
        )

    @override
    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.timeline}"


def draw_schedule_text(program: Program, *, marked_positions: Mapping[int, int]) -> str:
    """Draw the computes that can run, and after them those that can't, with one tick for each.

    `marked_positions[rank]` is the index of the action to underline.
    """
    walk = walk_actions(program, costs=Costs(backward=1.0, update=1.0))
    order: dict[int, list[tuple[int, Action]]] = {}
    marked_computes: dict[int, int] = {}
    for rank, row in enumerate(program.actions):
        spans = [span for span in walk.spans if span.rank == rank]
        finished = [(round(span.start), span.action) for span in spans]
        now = round(spans[-1].stop) if spans else 0
        remaining = list(row[len(finished) :])
        ticks = [*finished, *((now + _count_computes(remaining[:n]), action) for n, action in enumerate(remaining))]
        order[rank] = [pair for pair in ticks if pair[1].op.is_compute]
        if rank in marked_positions:
            marked_computes[rank] = find_compute_index(row, position=marked_positions[rank])
    return draw_marked_panel(program, order=order, marks=marked_computes)


def _count_computes(actions: Sequence[Action]) -> int:
    return sum(action.op.is_compute for action in actions)


def find_compute_index(row: Sequence[Action], *, position: int) -> int:
    """Return the index, among the computes of a rank, of the action at `position`.

    For a message, use the compute that sends or needs it. For a position at the end, use the last compute.
    """
    if position >= len(row):
        return max(0, _count_computes(row) - 1)
    if not (action := row[position]).op.is_compute:
        ops = (Op.FORWARD,) if action.op in (Op.SEND_F, Op.RECV_F) else (Op.BACKWARD, Op.BACKWARD_INPUT)
        matching = [
            n for n, a in enumerate(row) if (a.stage, a.microbatch) == (action.stage, action.microbatch) and a.op in ops
        ]
        position = matching[0] if matching else position
    return _count_computes(row[:position])
