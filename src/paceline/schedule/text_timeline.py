"""Timelines as lines of text, for terminals and errors: one line per rank, one column per tick."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.schedule.program import Action, Program
from paceline.schedule.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A compute on its rank's line, from tick `at` for `long` ticks; `is_marked` puts a line of ^ under it."""

    at: int
    label: str
    long: int = 1
    is_marked: bool = False


def action_label(action: Action, *, with_stage: bool) -> str:
    """Return `F3`, or `F2.3` if the stage is not clear from the rank."""
    return f"{action.op}{action.stage}.{action.microbatch}" if with_stage else f"{action.op}{action.microbatch}"


def names_stages(actions: Sequence[Sequence[Action]]) -> bool:
    """Return True if a rank computes in more than one stage, so that labels must name the stage."""
    return any(len({a.stage for a in row if a.op.is_compute}) > 1 for row in actions)


def in_text(timeline: Timeline, *, width: int = 120) -> str:
    """Return the timeline as panels of `width` characters, followed by the bubble fraction.

    A tick is the shortest compute; a longer one is drawn with `-`, idle ticks with `.`.
    """
    rows: list[list[Action]] = [[s.action for s in timeline.computes if s.rank == r] for r in range(timeline.num_ranks)]
    with_stage = names_stages(rows)
    tick = min((span.seconds for span in timeline.computes if span.seconds > 0), default=1.0)
    lines: list[list[Cell]] = [[] for _ in rows]
    for span in sorted((s for s in timeline.computes if s.seconds > 0), key=lambda s: s.start):
        line = lines[span.rank]
        at = max(round((span.start - timeline.start) / tick), line[-1].at + line[-1].long if line else 0)
        long = max(1, round(span.seconds / tick))
        line.append(Cell(at=at, long=long, label=action_label(span.action, with_stage=with_stage)))
    ticks = max((line[-1].at + line[-1].long for line in lines if line), default=0)
    each = max(1, (width - _HEAD) // _cell_width(lines))
    panels = [panel(lines, first=first, last=min(first + each, ticks)) for first in range(0, ticks, each)]
    return "\n\n".join([*panels, f"{timeline.name}: bubble {timeline.bubble:.1%}"])


def panel(lines: Sequence[Sequence[Cell]], *, first: int, last: int) -> str:
    """Return ticks `first` to `last` of every rank as text."""
    wide = _cell_width(lines)
    found = []
    for rank, line in enumerate(lines):
        drawn, marks = _drawn(line, first=first, last=last, wide=wide)
        found.append(f"rank {rank}".ljust(_HEAD) + drawn.rstrip())
        if marks.strip():
            found.append(" " * _HEAD + marks.rstrip())
    return "\n".join(found)


def marked_panel(
    program: Program, *, order: Mapping[int, Sequence[tuple[int, Action]]], marks: Mapping[int, int], width: int = 118
) -> str:
    """Return the timeline around its marks: `order[rank]` are (tick, compute), `marks[rank]` is a place in it."""
    with_stage = names_stages([[action for _, action in row] for row in order.values()])
    lines = [
        [
            Cell(at=tick, label=action_label(action, with_stage=with_stage), is_marked=marks.get(rank) == place)
            for place, (tick, action) in enumerate(order[rank])
        ]
        for rank in range(program.num_ranks)
    ]
    each = max(1, (width - _HEAD) // _cell_width(lines))
    at = [cell.at for line in lines for cell in line if cell.is_marked]
    middle = at[0] if at else 0
    first = max(0, middle - each // 2)
    return panel(lines, first=first, last=first + each)


_HEAD = 9


def _cell_width(lines: Sequence[Sequence[Cell]]) -> int:
    return max((len(cell.label) for line in lines for cell in line), default=1) + 1


def _drawn(line: Sequence[Cell], *, first: int, last: int, wide: int) -> tuple[str, str]:
    end = min(last, max((cell.at + cell.long for cell in line), default=first))
    texts = [".".ljust(wide)] * max(0, end - first)
    marks = [" " * wide] * len(texts)
    for cell in line:
        for tick in range(max(cell.at, first), min(cell.at + cell.long, end)):
            is_last = tick == cell.at + cell.long - 1
            more = "-" * (wide - 1) + " " if is_last else "-" * wide
            head = cell.label.ljust(wide, " " if is_last else "-")
            texts[tick - first] = head if tick == cell.at else more
            marks[tick - first] = ("^" * len(cell.label)).ljust(wide) if cell.is_marked else marks[tick - first]
    return "".join(texts), "".join(marks)
