"""A comparison of layouts of one job: a table for the screen and one page with pictures, from plain numbers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from paceline.console.formatting import format_size, plural
from paceline.filesystem.atomic_files import write_text
from paceline.reporting.run_report import document
from paceline.reporting.svg.bar_chart import BarRow, bars
from paceline.reporting.svg.charts import INKS, Curve, chart

_KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
_NONE = "–"
_NOTHING = (_NONE, format_size(0))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of one layout. A layout that was refused or failed has a `reason` and no numbers.

    `held`: for each rank the bytes of each kind at its peak, and `sent` the bytes of each collective in one step.
    `bubble` is measured, `planned` that of the schedule with stages of equal length.
    `schedule` is the picture (SVG) of the schedule as planned and, on the same axis, as measured.
    """

    name: str
    ranks: int
    verdict: str = ""
    reason: str = ""
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    held: Sequence[Mapping[str, int]] = ()
    sent: Sequence[Mapping[str, float]] = ()
    bubble: float | None = None
    planned: float | None = None
    losses: Sequence[tuple[float, float]] = ()
    schedule: str = ""
    notes: Sequence[str] = field(default=())

    @property
    def peak(self) -> Mapping[str, int]:
        """The bytes of each kind on the rank whose peak is highest."""
        return max(self.held, key=_total, default={})

    @property
    def most_sent(self) -> float | None:
        """The bytes sent by the rank that sends most."""
        return max((sum(rank.values()) for rank in self.sent), default=None)


_COLUMNS: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("layout", lambda m: m.name),
    ("ranks", lambda m: str(m.ranks)),
    ("verdict", lambda m: m.verdict or _NONE),
    ("step", lambda m: _seconds(m.step_seconds)),
    ("samples/s", lambda m: _rate(m.samples_per_second)),
    ("tokens/s", lambda m: _rate(m.tokens_per_second)),
    ("peak per rank", lambda m: format_size(_total(m.peak)) if m.held else _NONE),
    *((kind, lambda m, kind=kind: format_size(m.peak[kind]) if kind in m.peak else _NONE) for kind in _KINDS),
    ("sent per step", lambda m: _NONE if m.most_sent is None else format_size(int(m.most_sent))),
    ("bubble", lambda m: _bubble(m)),
)


def comparison_rows(found: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per layout; columns without any value are left out."""
    table = [[show(each) for _, show in _COLUMNS] for each in found]
    kept = [at for at in range(len(_COLUMNS)) if at < 2 or any(row[at] not in _NOTHING for row in table)]
    return [_COLUMNS[at][0] for at in kept], [[row[at] for at in kept] for row in table]


def text(found: Sequence[Measured]) -> str:
    """Return the table for the screen."""
    head, body = comparison_rows(found)
    wide = [max(len(row[at]) for row in [head, *body]) for at in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip() for row in [head, *body]]
    return "\n".join(lines + [f"{each.name}: {line}" for each in found for line in _said(each)])


def write_layouts(found: Sequence[Measured], *, job: str, to: Path, proof: str = "") -> Path:
    """Write the page, which loads nothing from the network."""
    write_text(to, comparison_page(found, job=job, proof=proof))
    return to


def comparison_page(found: Sequence[Measured], *, job: str, proof: str = "") -> str:
    """Return the page: table, verdicts, memory per rank, losses, bytes sent, planned and measured schedules."""
    ran = [each for each in found if each.held or each.losses]
    parts = [
        f"<header><h1>{escape(job)} <small>{plural(len(found), 'layout')}, the same samples</small></h1></header>",
        _table(found, proof),
        _section(
            "Memory per rank",
            _held(ran),
            "at the peak of one step; before the first backward there are no gradients; activations include all "
            "that is in no other group, such as gathered weights",
        ),
        _losses(ran),
        _section("Bytes sent per step", _sent(ran), "by the rank that sends most"),
        *(_schedule(each) for each in found if each.schedule),
    ]
    return document(f"{job} · layouts", parts)


def _table(found: Sequence[Measured], proof: str) -> str:
    head, body = comparison_rows(found)
    place = head.index("verdict") if "verdict" in head else -1
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ""
    for row in body:
        shown = [
            f'<td><span class="badge {escape(cell)}">{escape(cell)}</span></td>'
            if at == place and cell != _NONE
            else f"<td>{escape(cell)}</td>"
            for at, cell in enumerate(row)
        ]
        lines += f"<tr>{''.join(shown)}</tr>"
    said = "".join(f"<li><b>{escape(each.name)}</b>: {escape(line)}</li>" for each in found for line in _said(each))
    notes = f"<ul>{said}</ul>" if said else ""
    worth = f'<p class="soft">{escape(proof)}</p>' if proof else ""
    return f'<section><div class="table"><table><tr>{cells}</tr>{lines}</table></div>{notes}{worth}</section>'


def _held(found: Sequence[Measured]) -> str:
    lines = [row for each in found for row in _ranks(each)]
    return bars("bytes per rank", _KINDS, lines)


def _ranks(each: Measured) -> list[BarRow]:
    """Return one bar for all ranks if they look the same: no part differs by more than 1% of the whole."""
    groups: list[list[int]] = []
    for rank, parts in enumerate(each.held):
        near = next((group for group in groups if _alike(each.held[group[0]], parts)), None)
        groups.append([rank]) if near is None else near.append(rank)
    rows = []
    for at, group in enumerate(groups):
        said = f"{'rank' if len(group) == 1 else 'ranks'} {_spans(group)}"
        rows.append(
            BarRow(
                name="" if at else each.name,
                label=said,
                parts={kind: each.held[group[0]].get(kind, 0) for kind in _KINDS},
            )
        )
    return rows


def _alike(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    near = 0.01 * max(_total(one), _total(other))
    return all(abs(one.get(kind, 0) - other.get(kind, 0)) <= near for kind in _KINDS)


def _spans(ranks: Sequence[int]) -> str:
    """Format a set of ranks, as `0–3, 6`."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    return ", ".join("–".join(map(str, span)) for span in found)


def _sent(found: Sequence[Measured]) -> str:
    most = {each.name: max(each.sent, key=_sum, default={}) for each in found}
    sums: dict[str, float] = {}
    for parts in most.values():
        for kind, value in parts.items():
            sums[kind] = sums.get(kind, 0.0) + value
    kinds = sorted((kind for kind, value in sums.items() if value), key=lambda kind: -sums[kind])
    shown = kinds if len(kinds) <= INKS else [*kinds[: INKS - 1], "others"]
    lines = []
    for name, parts in most.items():
        own: dict[str, float] = {kind: parts.get(kind, 0.0) for kind in shown}
        own |= {"others": sum(parts.get(kind, 0.0) for kind in kinds[INKS - 1 :])} if "others" in shown else {}
        lines.append(BarRow(name=name, parts=own))
    return bars("bytes per step", shown, lines)


def _losses(found: Sequence[Measured]) -> str:
    curves = [Curve(name=each.name, points=each.losses) for each in found if each.losses]
    drawn = chart("loss", curves)
    if len(curves) > 1:
        first = dict(curves[0].points)
        apart = [  # the first layout too, so that each keeps its colour
            Curve(
                name=each.name, points=[(step, abs(loss - first[step])) for step, loss in each.points if step in first]
            )
            for each in curves
        ]
        drawn += chart(f"difference of the loss from {curves[0].name}", apart)
    return f'<section><h2>Losses</h2><div class="charts wider">{drawn}</div></section>' if drawn else ""


def _schedule(each: Measured) -> str:
    planned = "" if each.planned is None else f"; {each.planned:.1%} if all stages took equally long"
    said = "The share of a step in which a rank is idle; above, the schedule as planned with the median of "
    said += "the measured times; below, one measured step"
    bubble = "" if each.bubble is None else f'<p class="soft">measured bubble {each.bubble:.1%}{planned}. {said}</p>'
    title = f"<h2>The schedule of {escape(each.name)}, planned and measured</h2>"
    wide = re.sub(
        r'<svg (.*?width="(\d+)")', r'<svg style="max-width:none;width:\2px" \1', each.schedule, count=1
    )  # it scrolls if the window is too narrow
    return f'<section>{title}{bubble}<figure class="table">{wide}</figure></section>'


def _section(title: str, body: str, note: str) -> str:
    return f'<section><h2>{title}</h2><p class="soft">{escape(note)}</p>{body}</section>' if body else ""


def _said(each: Measured) -> list[str]:
    return [*([each.reason] if each.reason else []), *each.notes]


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.get(kind, 0) for kind in _KINDS)


def _sum(parts: Mapping[str, Any]) -> float:
    return float(sum(parts.values()))


def _bubble(each: Measured) -> str:
    planned = "" if each.planned is None else f" (plan {each.planned:.1%})"
    return _NONE if each.bubble is None else f"{each.bubble:.1%}{planned}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _rate(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"
