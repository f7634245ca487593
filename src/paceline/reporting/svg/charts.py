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
    mean_window,
    running_mean,
    thin_points,
    value_band,
)

_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 30, 24
_MAX_COLUMNS = 90  # of a split chart
_MAX_DOTS = 24  # a line with more points has no dots
_SCIENTIFIC = 1e-3  # a smaller tick is written as a power of ten
_LABEL_ROWS, _LETTER_WIDTH = 2, 5.2
NUM_COLORS = 6


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
        fraction = (value - self.y_low) / (self.y_high - self.y_low)
        return _HEIGHT - _BOTTOM - fraction * (_HEIGHT - _TOP - _BOTTOM)


def draw_chart(title: str, curves: Sequence[Curve], *, marks: Sequence[ResumeMark] = ()) -> str:
    """Draw lines over steps; return '' if there is no finite value.

    A noisy curve is drawn as a band of all values and their running mean. A non-finite value is drawn as a gap, with a
    red stroke on the axis. `marks` are drawn as dashed vertical lines.
    """
    finite = [p for curve in curves for p in curve.points if math.isfinite(p[1])]
    if not finite:
        return ""
    frame = _frame([p[0] for curve in curves for p in curve.points], [p[1] for p in finite])
    body = [_draw_axes(title, frame), *_draw_marks(marks, frame)]
    captions = []
    for number, curve in enumerate(curves):
        is_noisy_curve = is_noisy(curve.points)
        body += (
            _draw_noisy(curve.points, frame, number)
            if is_noisy_curve
            else _draw_line(thin_points(curve.points), frame, number)
        )
        body += _draw_non_finite(curve.points, frame)
        smoothing_note = (
            f"mean of {mean_window(curve.points)} logged values, band: lowest to highest" if is_noisy_curve else ""
        )
        if len(curves) > 1 or is_noisy_curve:
            name = curve.name if len(curves) > 1 else ""
            captions.append((number, " · ".join(part for part in (name, smoothing_note) if part)))
    return _figure(title, body, captions)


def draw_split_chart(title: str, names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]]) -> str:
    """Draw stacked columns over steps. Steps that share a column are averaged."""
    columns = mean_columns(rows, max_columns=_MAX_COLUMNS)
    if not columns:
        return ""
    top = max(sum(parts) for _, _, parts in columns)
    if not math.isfinite(top) or top <= 0:
        return ""
    frame = _frame([columns[0][0], columns[-1][1]], [0.0, top])
    width = (_WIDTH - _LEFT - _RIGHT) / len(columns)
    body = [_draw_axes(title, frame)]
    for column, (first, last, parts) in enumerate(columns):
        stacked_value, cells = 0.0, []
        for number, value in enumerate(parts):
            y, height = frame.y(stacked_value + value), frame.y(stacked_value) - frame.y(stacked_value + value)
            if height > 0:
                cells.append(
                    f'<rect x="{_LEFT + column * width:.2f}" y="{y:.2f}" width="{max(width - 0.3, 0.3):.2f}" '
                    f'height="{height:.2f}" class="fill{number % NUM_COLORS}"/>'
                )
            stacked_value += value
        tooltip = ", ".join(f"{name} {value:.3g}" for name, value in zip(names, parts, strict=True))
        body.append(f"<g><title>steps {first:.0f} to {last:.0f}: {escape(tooltip)}</title>{''.join(cells)}</g>")
    return _figure(title, body, list(enumerate(names)))


def draw_stacked_bar(shares: Mapping[str, float]) -> str:
    """Draw one bar of shares that add up to 1."""
    x, parts, legend = 0.0, [], []
    for number, (name, share) in enumerate(shares.items()):
        parts.append(
            f'<rect x="{x:.2f}" y="0" width="{share * 100:.2f}" height="10" class="fill{number % NUM_COLORS}"/>'
        )
        legend.append(f'<span><i class="box{number % NUM_COLORS}"></i>{escape(name)} {share:.1%}</span>')
        x += share * 100
    bar = f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" class="bar">{"".join(parts)}</svg>'
    return f'{bar}<p class="legend">{"".join(legend)}</p>'


def _figure(title: str, body: Sequence[str], captions: Sequence[tuple[int, str]]) -> str:
    items = "".join(f'<span><i class="box{n % NUM_COLORS}"></i>{escape(text)}</span>' for n, text in captions)
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
    """Return two to five round values between `low` and `high`."""
    min_interval = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(min_interval))
    interval = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= min_interval)
    first = math.ceil(low / interval)
    return [n * interval for n in range(first, math.floor(high / interval) + 1)]


def _draw_axes(title: str, frame: _Frame) -> str:
    lines = [f'<text x="{_LEFT}" y="15" class="title">{escape(title)}</text>']
    for value in _ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(
            f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" class="tick" text-anchor="end">{_format_tick(value)}</text>'
        )
    for fraction, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = frame.x_low + fraction * (frame.x_high - frame.x_low)
        x, y = frame.x(value), _HEIGHT - 8
        is_short = frame.x_high - frame.x_low < 5  # an axis of seconds: rounded labels would be equal
        label = f"{value:,.0f}" if not is_short or value == int(value) else f"{value:,.2f}"
        lines.append(f'<text x="{x:.1f}" y="{y}" class="tick" text-anchor="{anchor}">{label}</text>')
    return "".join(lines)


def _draw_noisy(points: Sequence[Point], frame: _Frame, number: int) -> list[str]:
    band = value_band(points)
    upper = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in band]
    lower = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(band)]
    area = f'<polygon points="{" ".join(upper + lower)}" class="band fill{number % NUM_COLORS}"/>'
    mean = thin_points(running_mean(points, window=mean_window(points)))
    return [area, *_draw_line(mean, frame, number)]


def _draw_line(points: Sequence[Point], frame: _Frame, number: int) -> list[str]:
    segments: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            segments[-1].append(f"{frame.x(step):.1f},{frame.y(value):.1f}")
        elif segments[-1]:
            segments.append([])
    overlay_class = " over" if number else ""
    shapes = [
        f'<polyline points="{" ".join(segment)}" class="line{number % NUM_COLORS}{overlay_class}"/>'
        for segment in segments
        if len(segment) > 1
    ]
    for segment in segments:
        if len(segment) == 1:
            x, y = segment[0].split(",")
            shapes.append(f'<circle cx="{x}" cy="{y}" r="2.5" class="fill{number % NUM_COLORS}"/>')
    if points and len(points) <= _MAX_DOTS:
        shapes += [
            f'<circle cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="2" class="fill{number % NUM_COLORS}">'
            f"<title>step {s:.0f}: {v:.6g}</title></circle>"
            for s, v in points
            if math.isfinite(v)
        ]
    return shapes


def _draw_non_finite(points: Sequence[Point], frame: _Frame) -> list[str]:
    """Draw a short stroke at each step with a non-finite value."""
    strokes = {round(frame.x(step)): (step, value) for step, value in points if not math.isfinite(value)}
    return [
        f'<line x1="{x}" x2="{x}" y1="{_HEIGHT - _BOTTOM - 9}" y2="{_HEIGHT - _BOTTOM}" class="lost">'
        f"<title>step {step:.0f}: {value}</title></line>"
        for x, (step, value) in sorted(strokes.items())
    ]


def _draw_marks(marks: Sequence[ResumeMark], frame: _Frame) -> list[str]:
    """Draw a line for each mark, with labels in two rows. A label without room is counted in the previous label."""
    shapes, labels = [], list[_Label]()
    for mark in sorted((m for m in marks if frame.x_low <= m.step <= frame.x_high), key=lambda m: m.step):
        x = frame.x(mark.step)
        shapes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="mark">'
            f"<title>resumed at step {mark.step}: {escape(mark.text)}</title></line>"
        )
        possible_labels = (_Label(x=x, row=row, texts=[mark.text]) for row in range(_LABEL_ROWS))
        label = next(
            (candidate for candidate in possible_labels if not any(candidate.overlaps(other) for other in labels)), None
        )
        if label is not None:
            labels.append(label)
        else:
            labels[-1].texts.append(mark.text)
    return [*shapes, *(label.svg for label in labels)]


@dataclass(frozen=True, kw_only=True)
class _Label:
    """A label next to a line: on its left in the right half of the picture, otherwise on its right."""

    x: float
    row: int
    texts: list[str]

    @property
    def svg(self) -> str:
        """Return the label as SVG, drawn over the lines of the chart."""
        anchor, x = ("end", self.x - 4) if self._is_left else ("start", self.x + 4)
        text = self.texts[0] if len(self.texts) == 1 else f"{len(self.texts)} resumes"
        y = _TOP + 7 + 11 * self.row
        return f'<text x="{x:.1f}" y="{y}" class="tick over-lines" text-anchor="{anchor}">{escape(text)}</text>'

    def overlaps(self, other: "_Label") -> bool:
        """Return True if the two labels would overlap, even if a label becomes a count of resumes."""
        own_span, other_span = self._span, other._span
        return self.row == other.row and own_span[0] < other_span[1] and other_span[0] < own_span[1]

    @property
    def _is_left(self) -> bool:
        return self.x > (_WIDTH + _LEFT) / 2

    @property
    def _span(self) -> tuple[float, float]:
        width = 6 + _LETTER_WIDTH * max(len(self.texts[0]), len("10 resumes"))
        return (self.x - width, self.x) if self._is_left else (self.x, self.x + width)


def _format_tick(value: float) -> str:
    if value and abs(value) < _SCIENTIFIC:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
