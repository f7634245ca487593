"""Draw timelines as one self-contained SVG. It is readable on light and dark backgrounds, and in black and white."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from paceline.console.formatting import plural
from paceline.schedule.program import Action, Op
from paceline.schedule.text_timeline import needs_stage_labels
from paceline.schedule.timeline import Span, Timeline

_LEFT, _RIGHT = 58, 128  # pixels for the text left and right of the plot
_TITLE, _ROW, _CELL, _FOOT = 34, 32, 28, 52  # heights in pixels; _FOOT has the axis and the legend
_OP_LABELS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "gradient of the input",
    Op.BACKWARD_WEIGHT: "gradient of the weights",
    Op.UPDATE: "update of the weights",
}


def draw(timeline: Timeline, *, measured: Timeline | None = None, unit: str = "") -> str:
    """Return the SVG of a timeline, with the measured timeline below it if given. They share the axis.

    Each compute shows its letter (F, B, I, W or U) above its microbatch. The letter is followed by the stage if a rank
    has several. On the right are the idle fraction of each rank and its peak number of stage activations. `unit` is the
    unit of time on the axis.
    """
    panels = [timeline] if measured is None else [timeline, measured]
    scale = _Scale.for_panels(panels)
    panel_height = _TITLE + _ROW * timeline.num_ranks
    body = [
        f'<g transform="translate(0 {n * (panel_height + 8)})">{_panel(p, scale)}</g>' for n, p in enumerate(panels)
    ]
    top = len(panels) * (panel_height + 8)
    used_ops = [op for op in _OP_LABELS if any(span.action.op is op for span in timeline.compute_spans)]
    axis_and_legend = _axis(scale, unit) + _legend(used_ops, with_stage=needs_stage_labels(_rows(timeline)))
    body.append(f'<g transform="translate(0 {top})">{axis_and_legend}</g>')
    size = f'viewBox="0 0 {scale.width:.0f} {top + _FOOT}" width="{scale.width:.0f}"'
    description = f"{timeline.name}: bubble {timeline.bubble:.1%}"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(description, quote=True)}">'
    return f"{start}<style>{_STYLE}</style>{''.join(body)}</svg>\n"


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """The scale from seconds to pixels, which all panels (one for each timeline) share."""

    total_seconds: float
    pixels_per_second: float

    @staticmethod
    def for_panels(panels: Sequence[Timeline]) -> "_Scale":
        seconds = max(panel.makespan for panel in panels) or 1.0
        without_updates = [span for span in panels[0].compute_spans if span.action.op is not Op.UPDATE]
        durations = sorted(span.seconds for span in without_updates if span.seconds > 0) or [seconds]
        plot_width = min(max(seconds / durations[len(durations) // 10] * 17, 560), 4200)
        return _Scale(total_seconds=seconds, pixels_per_second=plot_width / seconds)

    @property
    def width(self) -> float:
        """Return the width of the picture."""
        return _LEFT + self.total_seconds * self.pixels_per_second + _RIGHT

    def x(self, seconds: float) -> float:
        """Return the x coordinate of a time."""
        return _LEFT + seconds * self.pixels_per_second


def _panel(timeline: Timeline, scale: _Scale) -> str:
    rows = _rows(timeline)
    with_stage = needs_stage_labels(rows)
    stage_numbers = {stage: n for row in rows for n, stage in enumerate(sorted({action.stage for action in row}))}
    peak_activations = timeline.peak_activations()
    heading = f"{timeline.name} · {plural(timeline.num_ranks, 'rank')} · bubble {timeline.bubble:.1%}"
    shapes = [f'<text class="t" x="{_LEFT}" y="20">{escape(heading)}</text>']
    end = scale.x(scale.total_seconds)
    for rank in range(timeline.num_ranks):
        y = _TITLE + rank * _ROW
        shapes.append(f'<text class="s" x="{_LEFT - 8}" y="{y + 18}" text-anchor="end">rank {rank}</text>')
        shapes.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="{_CELL}"/>')
        label = f"idle {timeline.bubbles[rank]:.1%}" + (
            f" · holds {peak_activations[rank]:g}" if any(peak_activations) else ""
        )
        shapes.append(f'<text class="s" x="{end + 8:.1f}" y="{y + 18}">{label}</text>')
    for span in timeline.compute_spans:
        shade = "b" if stage_numbers[span.action.stage] % 2 else "a"
        shapes += _cell(span, timeline.start, scale, with_stage=with_stage, shade=shade)
    return "".join(shapes)


def _rows(timeline: Timeline) -> list[list[Action]]:
    return [[span.action for span in timeline.compute_spans if span.rank == rank] for rank in range(timeline.num_ranks)]


def _cell(span: Span, start: float, scale: _Scale, *, with_stage: bool, shade: str) -> Iterator[str]:
    action = span.action
    x, width = scale.x(span.start - start), span.seconds * scale.pixels_per_second
    y = _TITLE + span.rank * _ROW
    kind = f"{action.op}{shade}"
    tooltip = f"{action} on rank {span.rank}: {span.start - start:.4g} to {span.stop - start:.4g}"
    shape = f'x="{x + 0.5:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{_CELL}" rx="2"'
    yield f'<rect class="{kind}" {shape}><title>{tooltip}</title></rect>'
    if width < 9:
        return
    middle = f'x="{x + width / 2:.1f}" text-anchor="middle" class="on {kind}t'
    letter = f"{action.op}{action.stage}" if with_stage else str(action.op)
    size = "k" if len(letter) < 3 else "k kk"
    yield f'<text {middle} {size}" y="{y + 11}">{letter}</text><text {middle}" y="{y + 23}">{action.microbatch}</text>'


def _axis(scale: _Scale, unit: str) -> str:
    step = _round_step(scale.total_seconds / 8)
    count = floor(scale.total_seconds / step + 1e-9)
    shapes = [f'<path class="axis" d="M{_LEFT} 4H{scale.x(scale.total_seconds):.1f}"/>']
    for n in range(count + 1):
        x = scale.x(n * step)
        shapes.append(f'<path class="axis" d="M{x:.1f} 4v4"/>')
        text = f"{n * step:g} {unit}" if n == count else f"{n * step:g}"
        shapes.append(f'<text class="s" x="{x:.1f}" y="21" text-anchor="middle">{escape(text.strip())}</text>')
    return "".join(shapes)


def _round_step(step: float) -> float:
    """Return the smallest number that is at least `step` and is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _legend(ops: Sequence[Op], *, with_stage: bool) -> str:
    x = float(_LEFT)
    shapes = []
    for op in ops:
        shapes.append(f'<rect class="{op}a" x="{x:.0f}" y="31" width="16" height="16" rx="2"/>')
        shapes.append(f'<text class="on {op}at" x="{x + 8:.0f}" y="43" text-anchor="middle">{op}</text>')
        shapes.append(f'<text class="s" x="{x + 21:.0f}" y="43">{_OP_LABELS[op]}</text>')
        x += 36 + 5.7 * len(_OP_LABELS[op])
    if with_stage:
        note = "above: letter and stage; below: microbatch; light: every second stage of a rank"
        shapes.append(f'<text class="s" x="{x:.0f}" y="43">{note}</text>')
    return "".join(shapes)


_DARK_TEXT, _WHITE = "#14181c", "#fff"
# fill and text colour of each operation, in two shades: the first for a rank's first, third, ... stage
_COLORS = {
    Op.FORWARD: (("#0b62a4", _WHITE), ("#8cc4ea", _DARK_TEXT)),
    Op.BACKWARD: (("#b34d00", _WHITE), ("#f3b48c", _DARK_TEXT)),
    Op.BACKWARD_INPUT: (("#e0a100", _DARK_TEXT), ("#f4da96", _DARK_TEXT)),
    Op.BACKWARD_WEIGHT: (("#00745a", _WHITE), ("#8fd3bf", _DARK_TEXT)),
    Op.UPDATE: (("#7b3fa0", _WHITE), ("#cdb0e0", _DARK_TEXT)),
}
_STYLE = (
    "text{font:11px system-ui,-apple-system,'Segoe UI',sans-serif;font-variant-numeric:tabular-nums}"
    ".t{font-weight:600;font-size:13px;fill:#1d2126}.s{fill:#59626b}.on{font-size:10px}.k{font-size:8px}.kk{font-size:7px}"
    ".idle{fill:#8a94a0;opacity:.16}.axis{fill:none;stroke:#8a94a0}"
    + "".join(
        f".{op}{shade}{{fill:{fill}}}.{op}{shade}t{{fill:{text}}}"
        for op, shades in _COLORS.items()
        for shade, (fill, text) in zip("ab", shades, strict=True)
    )
    + "@media(prefers-color-scheme:dark){.t{fill:#e5e8eb}.s{fill:#a5b0ba}}"
)
