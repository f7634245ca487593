"""A comparison of layouts of one job: a table for the screen, and a page with charts."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from paceline.console.formatting import format_size, plural
from paceline.filesystem.atomic_files import write_text
from paceline.reporting.run_report import html_document
from paceline.reporting.svg.bar_chart import BarRow, draw_bars
from paceline.reporting.svg.charts import NUM_COLORS, Curve, draw_chart

_KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
_DASH = "–"
_EMPTY_CELLS = (_DASH, format_size(0))


@dataclass(frozen=True, kw_only=True)
class MeasuredLayout:
    """The measurements of one layout. A layout that was refused or failed has a `reason` and no numbers."""

    name: str
    ranks: int
    verdict: str = ""
    reason: str = ""
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    memory_by_rank: Sequence[Mapping[str, int]] = ()
    """The bytes of each kind at the peak of each rank."""
    sent_by_rank: Sequence[Mapping[str, float]] = ()
    """The bytes that each rank sends in one step, by collective."""
    bubble: float | None = None
    """The measured bubble, as a fraction of the step."""
    planned_bubble: float | None = None
    """The bubble that the schedule would have if all stages took equally long."""
    losses: Sequence[tuple[float, float]] = ()
    """Pairs of step and loss."""
    schedule: str = ""
    """An SVG with the planned and the measured schedule on the same time axis."""
    notes: Sequence[str] = field(default=())

    @property
    def peak_memory(self) -> Mapping[str, int]:
        """The bytes of each kind on the rank whose peak is highest."""
        return max(self.memory_by_rank, key=_total_memory, default={})

    @property
    def max_sent_bytes(self) -> float | None:
        """The bytes sent by the rank that sends most."""
        return max((sum(rank.values()) for rank in self.sent_by_rank), default=None)


_COLUMNS: tuple[tuple[str, Callable[[MeasuredLayout], str]], ...] = (
    ("layout", lambda m: m.name),
    ("ranks", lambda m: str(m.ranks)),
    ("verdict", lambda m: m.verdict or _DASH),
    ("step", lambda m: _format_seconds(m.step_seconds)),
    ("samples/s", lambda m: _format_rate(m.samples_per_second)),
    ("tokens/s", lambda m: _format_rate(m.tokens_per_second)),
    ("peak per rank", lambda m: format_size(_total_memory(m.peak_memory)) if m.memory_by_rank else _DASH),
    *(
        (kind, lambda m, kind=kind: format_size(m.peak_memory[kind]) if kind in m.peak_memory else _DASH)
        for kind in _KINDS
    ),
    ("sent per step", lambda m: _DASH if m.max_sent_bytes is None else format_size(int(m.max_sent_bytes))),
    ("bubble", lambda m: _format_bubble(m)),
)


def comparison_rows(layouts: Sequence[MeasuredLayout]) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per layout, without empty columns."""
    table = [[show(layout) for _, show in _COLUMNS] for layout in layouts]
    shown_columns = [
        column for column in range(len(_COLUMNS)) if column < 2 or any(row[column] not in _EMPTY_CELLS for row in table)
    ]
    return [_COLUMNS[column][0] for column in shown_columns], [
        [row[column] for column in shown_columns] for row in table
    ]


def comparison_text(layouts: Sequence[MeasuredLayout]) -> str:
    """Return the table for the screen."""
    head, body = comparison_rows(layouts)
    widths = [max(len(row[column]) for row in [head, *body]) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *body]]
    return "\n".join(lines + [f"{layout.name}: {line}" for layout in layouts for line in _layout_notes(layout)])


def write_layouts(layouts: Sequence[MeasuredLayout], *, job: str, to: Path, verification_note: str = "") -> Path:
    """Write the self-contained page of the comparison."""
    write_text(to, comparison_page(layouts, job=job, verification_note=verification_note))
    return to


def comparison_page(layouts: Sequence[MeasuredLayout], *, job: str, verification_note: str = "") -> str:
    """Return the HTML page: table, verdicts, memory per rank, losses, bytes sent, planned and measured schedules."""
    measured = [layout for layout in layouts if layout.memory_by_rank or layout.losses]
    parts = [
        f"<header><h1>{escape(job)} <small>{plural(len(layouts), 'layout')}, the same samples</small></h1></header>",
        _table_section(layouts, verification_note),
        _section(
            "Memory per rank",
            _memory_bars(measured),
            "at the peak of one step. If the peak comes before the first backward, there are no gradients yet. Activations "
            "include everything that is in no other group, such as gathered weights",
        ),
        _loss_section(measured),
        _section("Bytes sent per step", _sent_bars(measured), "by the rank that sends most"),
        *(_schedule_section(layout) for layout in layouts if layout.schedule),
    ]
    return html_document(f"{job} · layouts", parts)


def _table_section(layouts: Sequence[MeasuredLayout], verification_note: str) -> str:
    head, body = comparison_rows(layouts)
    verdict_column = head.index("verdict") if "verdict" in head else -1
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ""
    for row in body:
        shown = [
            f'<td><span class="badge {escape(cell)}">{escape(cell)}</span></td>'
            if column == verdict_column and cell != _DASH
            else f"<td>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        ]
        lines += f"<tr>{''.join(shown)}</tr>"
    notes = "".join(
        f"<li><b>{escape(layout.name)}</b>: {escape(line)}</li>" for layout in layouts for line in _layout_notes(layout)
    )
    note_list = f"<ul>{notes}</ul>" if notes else ""
    verification = f'<p class="soft">{escape(verification_note)}</p>' if verification_note else ""
    return (
        f'<section><div class="table"><table><tr>{cells}</tr>{lines}</table></div>{note_list}{verification}</section>'
    )


def _memory_bars(layouts: Sequence[MeasuredLayout]) -> str:
    lines = [row for layout in layouts for row in _rank_bars(layout)]
    return draw_bars("bytes per rank", _KINDS, lines)


def _rank_bars(layout: MeasuredLayout) -> list[BarRow]:
    """Return one bar for each group of similar ranks, in which no part differs by more than 1% of the total."""
    groups: list[list[int]] = []
    for rank, parts in enumerate(layout.memory_by_rank):
        similar = next((group for group in groups if _is_similar(layout.memory_by_rank[group[0]], parts)), None)
        groups.append([rank]) if similar is None else similar.append(rank)
    rows = []
    for number, group in enumerate(groups):
        label = f"{'rank' if len(group) == 1 else 'ranks'} {_format_ranks(group)}"
        rows.append(
            BarRow(
                name="" if number else layout.name,
                label=label,
                parts={kind: layout.memory_by_rank[group[0]].get(kind, 0) for kind in _KINDS},
            )
        )
    return rows


def _is_similar(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    tolerance = 0.01 * max(_total_memory(one), _total_memory(other))
    return all(abs(one.get(kind, 0) - other.get(kind, 0)) <= tolerance for kind in _KINDS)


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format a set of ranks, as `0–3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("–".join(map(str, span)) for span in spans)


def _sent_bars(layouts: Sequence[MeasuredLayout]) -> str:
    largest_senders = {layout.name: max(layout.sent_by_rank, key=_sum, default={}) for layout in layouts}
    sums: dict[str, float] = {}
    for parts in largest_senders.values():
        for kind, value in parts.items():
            sums[kind] = sums.get(kind, 0.0) + value
    kinds = sorted((kind for kind, value in sums.items() if value), key=lambda kind: -sums[kind])
    shown = kinds if len(kinds) <= NUM_COLORS else [*kinds[: NUM_COLORS - 1], "others"]
    lines = []
    for name, parts in largest_senders.items():
        values: dict[str, float] = {kind: parts.get(kind, 0.0) for kind in shown}
        values |= {"others": sum(parts.get(kind, 0.0) for kind in kinds[NUM_COLORS - 1 :])} if "others" in shown else {}
        lines.append(BarRow(name=name, parts=values))
    return draw_bars("bytes per step", shown, lines)


def _loss_section(layouts: Sequence[MeasuredLayout]) -> str:
    curves = [Curve(name=layout.name, points=layout.losses) for layout in layouts if layout.losses]
    charts = draw_chart("loss", curves)
    if len(curves) > 1:
        reference = dict(curves[0].points)
        differences = [  # includes the first layout, so that each layout keeps its colour
            Curve(
                name=curve.name,
                points=[(step, abs(loss - reference[step])) for step, loss in curve.points if step in reference],
            )
            for curve in curves
        ]
        charts += draw_chart(f"difference of the loss from {curves[0].name}", differences)
    return f'<section><h2>Losses</h2><div class="charts wider">{charts}</div></section>' if charts else ""


def _schedule_section(layout: MeasuredLayout) -> str:
    planned_note = (
        "" if layout.planned_bubble is None else f"; {layout.planned_bubble:.1%} if all stages took equally long"
    )
    caption = (
        "The bubble is the share of a step in which a rank is idle. Above: the planned schedule, with the median of "
    )
    caption += "the measured times. Below: one measured step"
    bubble = (
        ""
        if layout.bubble is None
        else f'<p class="soft">measured bubble {layout.bubble:.1%}{planned_note}. {caption}</p>'
    )
    title = f"<h2>The schedule of {escape(layout.name)}, planned and measured</h2>"
    full_width = re.sub(
        r'<svg (.*?width="(\d+)")', r'<svg style="max-width:none;width:\2px" \1', layout.schedule, count=1
    )  # it scrolls if the window is too narrow
    return f'<section>{title}{bubble}<figure class="table">{full_width}</figure></section>'


def _section(title: str, body: str, note: str) -> str:
    return f'<section><h2>{title}</h2><p class="soft">{escape(note)}</p>{body}</section>' if body else ""


def _layout_notes(layout: MeasuredLayout) -> list[str]:
    return [*([layout.reason] if layout.reason else []), *layout.notes]


def _total_memory(parts: Mapping[str, int]) -> int:
    return sum(parts.get(kind, 0) for kind in _KINDS)


def _sum(parts: Mapping[str, Any]) -> float:
    return float(sum(parts.values()))


def _format_bubble(layout: MeasuredLayout) -> str:
    planned_note = "" if layout.planned_bubble is None else f" (plan {layout.planned_bubble:.1%})"
    return _DASH if layout.bubble is None else f"{layout.bubble:.1%}{planned_note}"


def _format_seconds(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _format_rate(value: float | None) -> str:
    return _DASH if value is None else f"{value:,.0f}"
