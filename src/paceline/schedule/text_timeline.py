"""Draw timelines as text, for terminals and errors, with one line per rank and one column per tick.

A tick is the unit of time of a picture. A panel is a picture of as many ticks as fit into the width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.schedule.program import Action, Program
from paceline.schedule.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A compute in a rank's line that starts at `tick` and lasts `num_ticks`. If `is_marked`, ^ underlines it."""

    tick: int
    label: str
    num_ticks: int = 1
    is_marked: bool = False


def action_label(action: Action, *, with_stage: bool) -> str:
    """Return e.g. `F3` for the forward of microbatch 3, or `F2.3` with its stage 2."""
    return f"{action.op}{action.stage}.{action.microbatch}" if with_stage else f"{action.op}{action.microbatch}"


def needs_stage_labels(actions: Sequence[Sequence[Action]]) -> bool:
    """Return True if a rank computes in several stages, so that labels must name the stage."""
    return any(len({a.stage for a in row if a.op.is_compute}) > 1 for row in actions)


def draw_text(timeline: Timeline, *, width: int = 120) -> str:
    """Return the timeline as panels of `width` characters, followed by the bubble fraction.

    A tick has the length of the shortest compute. A longer compute is continued with `-`, and `.` is an idle tick.
    """
    rows: list[list[Action]] = [
        [s.action for s in timeline.compute_spans if s.rank == r] for r in range(timeline.num_ranks)
    ]
    with_stage = needs_stage_labels(rows)
    tick_seconds = min((span.seconds for span in timeline.compute_spans if span.seconds > 0), default=1.0)
    lines: list[list[Cell]] = [[] for _ in rows]
    for span in sorted((s for s in timeline.compute_spans if s.seconds > 0), key=lambda s: s.start):
        line = lines[span.rank]
        first_tick = max(
            round((span.start - timeline.start) / tick_seconds), line[-1].tick + line[-1].num_ticks if line else 0
        )
        num_ticks = max(1, round(span.seconds / tick_seconds))
        line.append(Cell(tick=first_tick, num_ticks=num_ticks, label=action_label(span.action, with_stage=with_stage)))
    total_ticks = max((line[-1].tick + line[-1].num_ticks for line in lines if line), default=0)
    ticks_per_panel = max(1, (width - _RANK_COLUMN_WIDTH) // _cell_width(lines))
    panels = [
        draw_panel(lines, first=first, last=min(first + ticks_per_panel, total_ticks))
        for first in range(0, total_ticks, ticks_per_panel)
    ]
    return "\n\n".join([*panels, f"{timeline.name}: bubble {timeline.bubble:.1%}"])


def draw_panel(lines: Sequence[Sequence[Cell]], *, first: int, last: int) -> str:
    """Draw the ticks of every rank from `first` up to, but not including, `last`."""
    cell_width = _cell_width(lines)
    rows = []
    for rank, line in enumerate(lines):
        line_text, marks = _draw_line(line, first=first, last=last, cell_width=cell_width)
        rows.append(f"rank {rank}".ljust(_RANK_COLUMN_WIDTH) + line_text.rstrip())
        if marks.strip():
            rows.append(" " * _RANK_COLUMN_WIDTH + marks.rstrip())
    return "\n".join(rows)


def draw_marked_panel(
    program: Program, *, order: Mapping[int, Sequence[tuple[int, Action]]], marks: Mapping[int, int], width: int = 118
) -> str:
    """Draw the part of the timeline around the first marked compute.

    `order[rank]` has (tick, compute) pairs. `marks[rank]` is the index of the marked pair.
    """
    with_stage = needs_stage_labels([[action for _, action in row] for row in order.values()])
    lines = [
        [
            Cell(tick=tick, label=action_label(action, with_stage=with_stage), is_marked=marks.get(rank) == index)
            for index, (tick, action) in enumerate(order[rank])
        ]
        for rank in range(program.num_ranks)
    ]
    num_ticks = max(1, (width - _RANK_COLUMN_WIDTH) // _cell_width(lines))
    marked_ticks = [cell.tick for line in lines for cell in line if cell.is_marked]
    middle = marked_ticks[0] if marked_ticks else 0
    first = max(0, middle - num_ticks // 2)
    return draw_panel(lines, first=first, last=first + num_ticks)


_RANK_COLUMN_WIDTH = 9  # of the names of the ranks, left of the timeline


def _cell_width(lines: Sequence[Sequence[Cell]]) -> int:
    return max((len(cell.label) for line in lines for cell in line), default=1) + 1


def _draw_line(line: Sequence[Cell], *, first: int, last: int, cell_width: int) -> tuple[str, str]:
    """Return the text of a rank's line, and the line of marks below it."""
    last_tick = min(last, max((cell.tick + cell.num_ticks for cell in line), default=first))
    texts = [".".ljust(cell_width)] * max(0, last_tick - first)
    marks = [" " * cell_width] * len(texts)
    for cell in line:
        for tick in range(max(cell.tick, first), min(cell.tick + cell.num_ticks, last_tick)):
            is_last = tick == cell.tick + cell.num_ticks - 1
            continuation = "-" * (cell_width - 1) + " " if is_last else "-" * cell_width
            start = cell.label.ljust(cell_width, " " if is_last else "-")
            texts[tick - first] = start if tick == cell.tick else continuation
            marks[tick - first] = ("^" * len(cell.label)).ljust(cell_width) if cell.is_marked else marks[tick - first]
    return "".join(texts), "".join(marks)
