"""Stacked horizontal bars as SVG text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from paceline.console.formatting import format_size
from paceline.reporting.svg.style import FILLS

_WIDTH, _BAR_HEIGHT, _ROW_HEIGHT, _TOP = 860, 13, 19, 26
_LETTER_WIDTH = 6.1
_MAX_LABEL_CHARACTERS = 30


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """One bar: its parts by kind, and the name and the label in front of it. A long name is shortened.

    A row with both a name and a label begins a group: there is a gap above it. `start` is the value at which the bar
    begins.
    """

    name: str = ""
    label: str = ""
    start: float = 0.0
    parts: Mapping[str, float]

    @property
    def row_label(self) -> str:
        """The text in front of the bar."""
        max_characters = max(_MAX_LABEL_CHARACTERS - len(self.label), 8)
        name = self.name if len(self.name) <= max_characters else self.name[: max_characters - 1] + "…"
        return " · ".join(part for part in (name, self.label) if part)

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(self.parts.values())


def _format_bytes(value: float) -> str:
    return format_size(int(value))


def draw_bars(
    title: str,
    kinds: Sequence[str],
    rows: Sequence[BarRow],
    *,
    format_value: Callable[[float], str] = _format_bytes,
    limit: float | None = None,
) -> str:
    """Draw bars with a common scale; return '' if there is nothing to draw.

    `format_value` formats a number with its unit; `limit` is the value of a vertical line.
    """
    largest = max([row.start + row.total for row in rows] + ([limit] if limit else []), default=0.0)
    if largest <= 0:
        return ""
    label_width = 14 + _LETTER_WIDTH * max(len(row.row_label) for row in rows)
    scale = (_WIDTH - label_width - 90) / largest
    shapes, y = [f'<text x="0" y="14" class="title">{escape(title)}</text>'], float(_TOP)
    totals = []
    for number, row in enumerate(rows):
        y += 7 if row.name and row.label and number else 0
        shapes.append(_draw_bar(row, kinds, label_width, y, scale, format_value))
        totals.append(_draw_total(row, label_width, y, scale, format_value))
        y += _ROW_HEIGHT
    if limit is not None:
        shapes.append(_draw_limit(label_width + limit * scale, y, format_value(limit)))
    shapes += totals
    shown_kinds = [kind for kind in kinds if any(row.parts.get(kind) for row in rows)]
    items = "".join(
        f'<span><i class="box{kinds.index(kind) % FILLS}"></i>{escape(kind.replace("_", " "))}</span>'
        for kind in shown_kinds
    )
    picture = f'<svg viewBox="0 0 {_WIDTH} {y:.0f}" role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg>'
    return f'<figure class="table">{picture}<figcaption class="legend">{items}</figcaption></figure>'


def _draw_limit(x: float, bottom: float, label: str) -> str:
    line = f'<path class="mark" d="M{x:.1f} {_TOP - 6}V{bottom:.1f}"/>'
    return f'{line}<text x="{x:.1f}" y="{_TOP - 9}" class="tick" text-anchor="middle">{escape(label)}</text>'


def _draw_bar(
    row: BarRow, kinds: Sequence[str], label_width: float, y: float, scale: float, format_value: Callable[[float], str]
) -> str:
    middle = y + _BAR_HEIGHT / 2 + 3.5
    shapes = [
        f'<text x="{label_width - 8:.1f}" y="{middle:.1f}" class="tick" text-anchor="end">{escape(row.row_label)}</text>'
    ]
    x = label_width + row.start * scale
    for number, kind in enumerate(kinds):
        width = row.parts.get(kind, 0.0) * scale
        if width > 0:
            tooltip = f"{kind.replace('_', ' ')} {format_value(row.parts[kind])}"
            shapes.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{_BAR_HEIGHT}" class="fill{number % FILLS}">'
                f"<title>{escape(tooltip)}</title></rect>"
            )
            x += width
    return "".join(shapes)


def _draw_total(row: BarRow, label_width: float, y: float, scale: float, format_value: Callable[[float], str]) -> str:
    x, middle = label_width + (row.start + row.total) * scale + 6, y + _BAR_HEIGHT / 2 + 3.5
    return f'<text x="{x:.1f}" y="{middle:.1f}" class="tick over-lines">{format_value(row.total)}</text>'
