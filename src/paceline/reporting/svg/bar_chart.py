"""Stacked horizontal bars as SVG text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from paceline.console.formatting import format_size
from paceline.reporting.svg.style import FILLS

_WIDTH, _HIGH, _STEP, _TOP = 860, 13, 19, 26
_LETTER = 6.1
_MOST_LABEL = 30


@dataclass(frozen=True, kw_only=True)
class BarRow:
    """One bar: bytes by kind, and a label. A row with a name begins a group; a name that is too long is cut."""

    name: str = ""
    label: str = ""
    parts: Mapping[str, float]

    @property
    def shown(self) -> str:
        """The text in front of the bar."""
        room = max(_MOST_LABEL - len(self.label), 8)
        name = self.name if len(self.name) <= room else self.name[: room - 1] + "…"
        return " · ".join(part for part in (name, self.label) if part)

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(self.parts.values())


def _bytes(value: float) -> str:
    return format_size(int(value))


def bars(
    title: str,
    kinds: Sequence[str],
    rows: Sequence[BarRow],
    *,
    show: Callable[[float], str] = _bytes,
    limit: float | None = None,
) -> str:
    """Draw bars on one scale, so that rows can be compared; return '' if there is nothing to draw.

    `show` formats a number with its unit; `limit` is a line that no bar should cross.
    """
    top = max([row.total for row in rows] + ([limit] if limit else []), default=0.0)
    if top <= 0:
        return ""
    left = 14 + _LETTER * max(len(row.shown) for row in rows)
    scale = (_WIDTH - left - 90) / top
    drawn, y = [f'<text x="0" y="14" class="title">{escape(title)}</text>'], float(_TOP)
    totals = []
    for number, row in enumerate(rows):
        y += 7 if row.name and row.label and number else 0
        drawn.append(_bar(row, kinds, left, y, scale, show))
        totals.append(_total(row, left, y, scale, show))
        y += _STEP
    if limit is not None:
        drawn.append(_limit(left + limit * scale, y, show(limit)))
    drawn += totals
    shown = [kind for kind in kinds if any(row.parts.get(kind) for row in rows)]
    items = "".join(
        f'<span><i class="box{kinds.index(kind) % FILLS}"></i>{escape(kind.replace("_", " "))}</span>' for kind in shown
    )
    picture = f'<svg viewBox="0 0 {_WIDTH} {y:.0f}" role="img" aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    return f'<figure class="table">{picture}<figcaption class="legend">{items}</figcaption></figure>'


def _limit(x: float, bottom: float, said: str) -> str:
    line = f'<path class="mark" d="M{x:.1f} {_TOP - 6}V{bottom:.1f}"/>'
    return f'{line}<text x="{x:.1f}" y="{_TOP - 9}" class="tick" text-anchor="middle">{escape(said)}</text>'


def _bar(row: BarRow, kinds: Sequence[str], left: float, y: float, scale: float, show: Callable[[float], str]) -> str:
    middle = y + _HIGH / 2 + 3.5
    said = [f'<text x="{left - 8:.1f}" y="{middle:.1f}" class="tick" text-anchor="end">{escape(row.shown)}</text>']
    x = left
    for number, kind in enumerate(kinds):
        wide = row.parts.get(kind, 0.0) * scale
        if wide > 0:
            told = f"{kind.replace('_', ' ')} {show(row.parts[kind])}"
            said.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{_HIGH}" class="fill{number % FILLS}">'
                f"<title>{escape(told)}</title></rect>"
            )
            x += wide
    return "".join(said)


def _total(row: BarRow, left: float, y: float, scale: float, show: Callable[[float], str]) -> str:
    x, middle = left + row.total * scale + 6, y + _HIGH / 2 + 3.5
    return f'<text x="{x:.1f}" y="{middle:.1f}" class="tick over-lines">{show(row.total)}</text>'
