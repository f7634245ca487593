"""Small pictures as SVG text, without a library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 26, 24
_MOST_POINTS = 360
_SCIENTIFIC = 1e-3


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A named line."""

    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, curves: Sequence[Curve], *, marks: Sequence[int] = ()) -> str:
    """Lines over steps; what is not finite is a gap, `marks` are dashed verticals (resumes)."""
    finite = [p for curve in curves for p in curve.points if math.isfinite(p[1])]
    if not finite:
        return ""
    x_range = _range([p[0] for curve in curves for p in curve.points])
    y_range = _range([p[1] for p in finite])
    body = [_axes(title, x_range, y_range)]
    body += [_mark(step, x_range) for step in marks if x_range[0] <= step <= x_range[1]]
    for number, curve in enumerate(curves):
        body += _line(thinned(curve.points), x_range, y_range, number)
        body += _lost(curve.points, x_range)
    if len(curves) > 1:
        body.append(_legend(curves))
    return f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg></figure>'


def stacked(shares: Mapping[str, float]) -> str:
    """One bar of shares that add up to 1."""
    x, parts, legend = 0.0, [], []
    for number, (name, share) in enumerate(shares.items()):
        parts.append(f'<rect x="{x:.2f}" y="0" width="{share * 100:.2f}" height="10" class="fill{number % 6}"/>')
        legend.append(f'<span><i class="box{number % 6}"></i>{escape(name)} {share:.1%}</span>')
        x += share * 100
    bar = f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" class="bar">{"".join(parts)}</svg>'
    return f'{bar}<p class="legend">{"".join(legend)}</p>'


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most a few hundred points: the lowest and the highest of each stretch."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept = []
    for start in range(0, len(points), size):
        part = [p for p in points[start : start + size] if math.isfinite(p[1])]
        if part:
            low, high = min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])
            kept += sorted({low, high})
        else:
            kept.append(points[start])
    return kept


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def _x(value: float, x_range: tuple[float, float]) -> float:
    return _LEFT + (value - x_range[0]) / (x_range[1] - x_range[0]) * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, y_range: tuple[float, float]) -> float:
    return _HEIGHT - _BOTTOM - (value - y_range[0]) / (y_range[1] - y_range[0]) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(title: str, x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    lines = [f'<text x="{_LEFT}" y="15" class="title">{escape(title)}</text>']
    for part in (0.0, 0.5, 1.0):
        value = y_range[0] + part * (y_range[1] - y_range[0])
        y = _y(value, y_range)
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" class="tick" text-anchor="end">{_tick(value)}</text>')
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = x_range[0] + part * (x_range[1] - x_range[0])
        x, y = _x(value, x_range), _HEIGHT - 8
        lines.append(f'<text x="{x:.1f}" y="{y}" class="tick" text-anchor="{anchor}">{value:,.0f}</text>')
    return "".join(lines)


def _line(
    points: Sequence[tuple[float, float]], x_range: tuple[float, float], y_range: tuple[float, float], number: int
) -> list[str]:
    runs: list[list[str]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            runs[-1].append(f"{_x(step, x_range):.1f},{_y(value, y_range):.1f}")
        elif runs[-1]:
            runs.append([])
    drawn = [f'<polyline points="{" ".join(run)}" class="line{number % 6}"/>' for run in runs if len(run) > 1]
    for run in runs:
        if len(run) == 1:
            x, y = run[0].split(",")
            drawn.append(f'<circle cx="{x}" cy="{y}" r="2.5" class="fill{number % 6}"/>')
    if points and len(points) <= 24:
        spots = [p for p in points if math.isfinite(p[1])]
        drawn += [
            f'<circle cx="{_x(s, x_range):.1f}" cy="{_y(v, y_range):.1f}" r="2" class="fill{number % 6}">'
            f"<title>step {s:.0f}: {v:.6g}</title></circle>"
            for s, v in spots
        ]
    return drawn


def _lost(points: Sequence[tuple[float, float]], x_range: tuple[float, float]) -> list[str]:
    """A short stroke below for each stretch of the width that holds a value that is not finite."""
    places = {round(_x(step, x_range)): (step, value) for step, value in points if not math.isfinite(value)}
    return [
        f'<line x1="{x}" x2="{x}" y1="{_HEIGHT - _BOTTOM - 9}" y2="{_HEIGHT - _BOTTOM}" class="lost">'
        f"<title>step {step:.0f}: {value}</title></line>"
        for x, (step, value) in sorted(places.items())
    ]


def _mark(step: int, x_range: tuple[float, float]) -> str:
    x = _x(step, x_range)
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="mark"><title>resumed at step {step}</title></line>'


def _legend(curves: Sequence[Curve]) -> str:
    return "".join(
        f'<text x="{_WIDTH - _RIGHT - 4}" y="{_TOP + 12 + 13 * n}" text-anchor="end" class="tick ink{n % 6}">{escape(c.name)}</text>'
        for n, c in enumerate(curves)
    )


def _tick(value: float) -> str:
    if value and abs(value) < _SCIENTIFIC:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
