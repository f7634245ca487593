"""Errors for faults in a program, with their place and a picture of the timeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import LayoutError
from paceline.schedule.action_walk import Costs, walk_actions
from paceline.schedule.program import Action, Op, Program
from paceline.schedule.text_timeline import marked_panel


@dataclass(frozen=True, kw_only=True)
class ScheduleFault:
    """A fault in a program; `place` is the action's index on the rank; the number of actions means the end."""

    rank: int
    place: int
    action: Action  # the foreign, duplicate, missing, too early or waiting action
    what: str
    cause: str = ""
    severity: int = 0  # order of report: 0 foreign or duplicate, 1 missing, 2 too early
    others: tuple[tuple[int, int], ...] = ()  # further (rank, place) to mark


class ScheduleError(LayoutError):
    """The error for a pipeline program that cannot be run: incomplete, out of order, or deadlocking."""

    def __init__(self, program: Program, fault: ScheduleFault, *, more: int = 0) -> None:
        row = program.actions[fault.rank] if fault.rank < len(program.actions) else ()
        place = (
            f"action {fault.place + 1} of {len(row)}: {row[fault.place]}" if fault.place < len(row) else "at the end"
        )
        also = f" (and {more} more after it)" if more else ""
        super().__init__(
            f"schedule {program.name!r}: {fault.what}{also}",
            where=f"rank {fault.rank}, {place}",
            cause=fault.cause,
            hint="fix that rank's line; `paceline.schedule.build` returns valid orders",
        )
        self.fault = fault
        self.timeline = schedule_picture(program, marks={fault.rank: fault.place, **dict(fault.others)})

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.timeline}"


def schedule_picture(program: Program, *, marks: Mapping[int, int]) -> str:
    """Draw the program with one tick per compute, as far as it runs, then the remaining actions, with marks."""
    followed = walk_actions(program, costs=Costs(backward=1.0, update=1.0))
    order: dict[int, list[tuple[int, Action]]] = {}
    places: dict[int, int] = {}
    for rank, row in enumerate(program.actions):
        spans = [span for span in followed.spans if span.rank == rank]
        done = [(round(span.start), span.action) for span in spans]
        now = round(spans[-1].stop) if spans else 0
        later = list(row[len(done) :])
        ticks = [*done, *((now + _computes(later[:n]), action) for n, action in enumerate(later))]
        order[rank] = [pair for pair in ticks if pair[1].op.is_compute]
        if rank in marks:
            places[rank] = compute_of(row, place=marks[rank])
    return marked_panel(program, order=order, marks=places)


def _computes(actions: Sequence[Action]) -> int:
    return sum(action.op.is_compute for action in actions)


def compute_of(row: Sequence[Action], *, place: int) -> int:
    """Return the index among the row's computes for an action: its own, or that of a message's compute."""
    if place >= len(row):
        return max(0, _computes(row) - 1)
    if not (action := row[place]).op.is_compute:
        kinds = (Op.FORWARD,) if action.op in (Op.SEND_F, Op.RECV_F) else (Op.BACKWARD, Op.INPUT)
        own = [
            n
            for n, a in enumerate(row)
            if (a.stage, a.microbatch) == (action.stage, action.microbatch) and a.op in kinds
        ]
        place = own[0] if own else place
    return _computes(row[:place])
