"""Small charts as SVG text, without a library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from paceline.reporting.run_history import ResumeMark
from paceline.reporting.svg.downsampling import (
    Point,
    is_noisy,
    mean_columns,
    running_mean,
    thin_points,
    value_band,
    window_of,
)

_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 30, 24
_MOST_COLUMNS, _MOST_DOTS = 90, 24
_SCIENTIFIC = 1e-3
_ROWS, _LETTER = 2, 5.2  # rows of labels; width of a letter
INKS = 6


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named line."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """The ranges of both axes."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def chart(title: str, curves: Sequence[Curve], *, marks: Sequence[ResumeMark] = ()) -> str:
    """Lines over steps. What goes up and down much is a band of all values with their running mean; what is not
    finite is a gap with a red stroke below; `marks` are dashed verticals (resumes)."""
    finite = [p for curve in curves for p in curve.points if math.isfinite(p[1])]
    if not finite:
        return ""
    frame = _frame([p[0] for curve in curves for p in curve.points], [p[1] for p in finite])
    body = [_axes(title, frame), *_marks(marks, frame)]
    captions = []
    for number, curve in enumerate(curves):
        noisy = is_noisy(curve.points)
        body += _noisy(curve.points, frame, number) if noisy else _line(thin_points(curve.points), frame, number)
        body += _lost(curve.points, frame)
        how = f"mean of {window_of(curve.points)} logged values, band: lowest to highest" if noisy else ""
        if len(curves) > 1 or noisy:
            name = curve.name if len(curves) > 1 else ""
            captions.append((number, " · ".join(part for part in (name, how) if part)))
    return _figure(title, body, captions)


def split_chart(title: str, names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]]) -> str:
    """Draw columns over steps, each stacked from its parts. Steps that share a column are averaged."""
    drawn = mean_columns(rows, most=_MOST_COLUMNS)
    if not drawn:
        return ""
    top = max(sum(parts) for _, _, parts in drawn)
    if not math.isfinite(top) or top <= 0:
        return ""
    frame = _frame([drawn[0][0], drawn[-1][1]], [0.0, top])
    width = (_WIDTH - _LEFT - _RIGHT) / len(drawn)
    body = [_axes(title, frame)]
    for place, (first, last, parts) in enumerate(drawn):
        base, cells = 0.0, []
        for number, value in enumerate(parts):
            y, high = frame.y(base + value), frame.y(base) - frame.y(base + value)
            if high > 0:
                cells.append(
                    f'<rect x="{_LEFT + place * width:.2f}" y="{y:.2f}" width="{max(width - 0.3, 0.3):.2f}" '
                    f'height="{high:.2f}" class="fill{number % INKS}"/>'
                )
            base += value
        said = ", ".join(f"{name} {value:.3g}" for name, value in zip(names, parts, strict=True))
        body.append(f"<g><title>steps {first:.0f} to {last:.0f}: {escape(said)}</title>{''.join(cells)}</g>")
    return _figure(title, body, list(enumerate(names)))


def stacked_bar(shares: Mapping[str, float]) -> str:
    """Draw one bar of shares that add up to 1."""
    x, parts, legend = 0.0, [], []
    for number, (name, share) in enumerate(shares.items()):
        parts.append(f'<rect x="{x:.2f}" y="0" width="{share * 100:.2f}" height="10" class="fill{number % INKS}"/>')
        legend.append(f'<span><i class="box{number % INKS}"></i>{escape(name)} {share:.1%}</span>')
        x += share * 100
    bar = f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" class="bar">{"".join(parts)}</svg>'
    return f'{bar}<p class="legend">{"".join(legend)}</p>'


def _figure(title: str, body: Sequence[str], captions: Sequence[tuple[int, str]]) -> str:
    items = "".join(f'<span><i class="box{n % INKS}"></i>{escape(text)}</span>' for n, text in captions)
    caption = f'<figcaption class="legend">{items}</figcaption>' if items else ""
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    return f"<figure>{drawing}{caption}</figure>"


def _frame(xs: Sequence[float], ys: Sequence[float]) -> _Frame:
    x_low, x_high = _range(xs)
    y_low, y_high = _range(ys)
    return _Frame(x_low=x_low, x_high=x_high, y_low=y_low, y_high=y_high)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high or not math.isfinite(high - low):
        pad = abs(low) * 0.1 or 1.0
        return low - pad, low + pad
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round values between the ends."""
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    size = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / size)
    return [n * size for n in range(first, math.floor(high / size) + 1)]


def _axes(title: str, frame: _Frame) -> str:
    lines = [f'<text x="{_LEFT}" y="15" class="title">{escape(title)}</text>']
    for value in _ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" class="tick" text-anchor="end">{_tick(value)}</text>')
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = frame.x_low + part * (frame.x_high - frame.x_low)
        x, y = frame.x(value), _HEIGHT - 8
        short = frame.x_high - frame.x_low < 5  # seconds: whole ones would appear twice
        said = f"{value:,.0f}" if not short or value == int(value) else f"{value:,.2f}"
        lines.append(f'<text x="{x:.1f}" y="{y}" class="tick" text-anchor="{anchor}">{said}</text>')
    return "".join(lines)


def _noisy(points: Sequence[Point], frame: _Frame, number: int) -> list[str]:
    edges = value_band(points)
    there = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in edges]
    back = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(edges)]
    area = f'<polygon points="{" ".join(there + back)}" class="band fill{number % INKS}"/>'
    mean = thin_points(running_mean(points, window=window_of(points)))
    return [area, *_line(mean, frame, number)]


def _line(points: Sequence[Point], frame: _Frame, number: int) -> list[str]:
    runs: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            runs[-1].append(f"{frame.x(step):.1f},{frame.y(value):.1f}")
        elif runs[-1]:
            runs.append([])
    over = " over" if number else ""
    drawn = [f'<polyline points="{" ".join(run)}" class="line{number % INKS}{over}"/>' for run in runs if len(run) > 1]
    for run in runs:
        if len(run) == 1:
            x, y = run[0].split(",")
            drawn.append(f'<circle cx="{x}" cy="{y}" r="2.5" class="fill{number % INKS}"/>')
    if points and len(points) <= _MOST_DOTS:
        drawn += [
            f'<circle cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="2" class="fill{number % INKS}">'
            f"<title>step {s:.0f}: {v:.6g}</title></circle>"
            for s, v in points
            if math.isfinite(v)
        ]
    return drawn


def _lost(points: Sequence[Point], frame: _Frame) -> list[str]:
    """Draw a short stroke below each stretch that contains a non-finite value."""
    places = {round(frame.x(step)): (step, value) for step, value in points if not math.isfinite(value)}
    return [
        f'<line x1="{x}" x2="{x}" y1="{_HEIGHT - _BOTTOM - 9}" y2="{_HEIGHT - _BOTTOM}" class="lost">'
        f"<title>step {step:.0f}: {value}</title></line>"
        for x, (step, value) in sorted(places.items())
    ]


def _marks(marks: Sequence[ResumeMark], frame: _Frame) -> list[str]:
    """Draw a stroke per mark, with labels in two rows; a label without room is counted in the label before it."""
    drawn, labels = [], list[_Label]()
    for mark in sorted((m for m in marks if frame.x_low <= m.step <= frame.x_high), key=lambda m: m.step):
        x = frame.x(mark.step)
        drawn.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="mark">'
            f"<title>resumed at step {mark.step}: {escape(mark.text)}</title></line>"
        )
        rooms = (_Label(x=x, row=row, said=[mark.text]) for row in range(_ROWS))
        label = next((room for room in rooms if not any(room.meets(other) for other in labels)), None)
        if label is not None:
            labels.append(label)
        else:
            labels[-1].said.append(mark.text)
    return [*drawn, *(label.drawn for label in labels)]


@dataclass(frozen=True, kw_only=True)
class _Label:
    """A label next to a stroke: on its left in the right half of the picture, otherwise on its right."""

    x: float
    row: int
    said: list[str]

    @property
    def drawn(self) -> str:
        """Return the label as SVG, above the lines."""
        anchor, x = ("end", self.x - 4) if self._is_left else ("start", self.x + 4)
        text = self.said[0] if len(self.said) == 1 else f"{len(self.said)} resumes"
        y = _TOP + 7 + 11 * self.row
        return f'<text x="{x:.1f}" y="{y}" class="tick over-lines" text-anchor="{anchor}">{escape(text)}</text>'

    def meets(self, other: "_Label") -> bool:
        """Return whether the two labels would overlap; a label may yet become a count."""
        mine, theirs = self._span, other._span
        return self.row == other.row and mine[0] < theirs[1] and theirs[0] < mine[1]

    @property
    def _is_left(self) -> bool:
        return self.x > (_WIDTH + _LEFT) / 2

    @property
    def _span(self) -> tuple[float, float]:
        wide = 6 + _LETTER * max(len(self.said[0]), len("10 resumes"))
        return (self.x - wide, self.x) if self._is_left else (self.x, self.x + wide)


def _tick(value: float) -> str:
    if value and abs(value) < _SCIENTIFIC:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
