"""The sections of a run's page with curves: metrics, time per step, and the norms of parameters and gradients."""

from collections.abc import Sequence
from html import escape

from paceline.reporting.run_history import History, ResumeMark
from paceline.reporting.svg.charts import Curve, draw_chart, draw_split_chart, draw_stacked_bar

TIME_PARTS = ("compute", "communication", "data", "evaluation", "checkpoint")
_SPEED_METRICS = ("tokens_per_second", "samples_per_second", "mfu")
_MAX_STATISTICS = 48  # charts of norms
_LOSS_TERM_PREFIX = "loss/"


def show_curves(history: History) -> str:
    """Return a section with charts of losses, metrics, speed, memory and samples over steps, as HTML."""
    names, marks = history.metric_names(), history.resume_marks()
    charts = [draw_chart("loss", _loss_curves(history, names), marks=marks)]
    charts += [_metric_chart(history, name, marks) for name in names if name.startswith(_LOSS_TERM_PREFIX)]
    charts += [_metric_chart(history, name, marks) for name in names if name.startswith(("eval/", "test/"))]
    charts += [_metric_chart(history, name, marks) for name in ("grad_norm", "lr", *_SPEED_METRICS) if name in names]
    charts.append(draw_chart("samples seen", [Curve(name="samples", points=history.samples())], marks=marks))
    charts.append(_metric_chart(history, "memory/peak_gib", marks, title="peak memory of a rank, GiB"))
    charts_html = "".join(charts)
    discarded_note = f'<p class="soft">The records of {history.num_discarded} logged steps were discarded, because the run was resumed from an earlier step.</p>'
    note = discarded_note if history.num_discarded else ""
    return f'<section><h2>Curves</h2>{note}<div class="charts">{charts_html}</div></section>' if charts_html else ""


def show_time(history: History) -> str:
    """Return a section with charts of the time per step, and of its parts per step and over the whole run, as HTML."""
    rows, shares = _split_time(history)
    if not rows:
        return ""
    seconds = [(step, value * 1e3) for step, value in history.points("time/step")]
    line = draw_chart("time per step, ms", [Curve(name="step", points=seconds)], marks=history.resume_marks())
    split = draw_split_chart("time per step by part, ms", [*TIME_PARTS, "other"], rows)
    return f'<section><h2>Where the time went</h2>{draw_stacked_bar(shares)}<div class="charts wider">{line}{split}</div></section>'


def show_statistics(history: History) -> str:
    """Return a section with charts of the norms of each parameter and its gradient, if the run logged them."""
    kinds = ("weight_norm/", "grad_norm/")
    names = [name for name in history.metric_names() if name.startswith(kinds)]
    if not names:
        return ""
    parameters = list(dict.fromkeys(name.partition("/")[2] for name in names))
    shown = parameters[: _MAX_STATISTICS // 2]
    charts = "".join(
        _metric_chart(history, kind + parameter, ())
        for parameter in shown
        for kind in kinds
        if kind + parameter in names
    )
    omitted_note = (
        f"<p>Left out: {len(parameters) - len(shown)} more parameters, whose norms are in metrics.jsonl.</p>"
        if len(parameters) > len(shown)
        else ""
    )
    title = f"Norms of {len(parameters)} parameters and their gradients"
    return f'<section><details><summary>{escape(title)}</summary>{omitted_note}<div class="charts">{charts}</div></details></section>'


def _loss_curves(history: History, names: Sequence[str]) -> list[Curve]:
    curves = [Curve(name="training", points=history.points("loss"))]
    if "eval/loss" in names:
        curves.append(Curve(name="evaluation", points=history.points("eval/loss")))
    return curves


def _metric_chart(history: History, name: str, marks: Sequence[ResumeMark], *, title: str = "") -> str:
    return draw_chart(title or name, [Curve(name=name, points=history.points(name))], marks=marks)


def _split_time(history: History) -> tuple[list[tuple[float, list[float]]], dict[str, float]]:
    """Return each logged step with the milliseconds of its parts, and each part's fraction of the whole time."""
    rows = []
    for step, seconds in history.points("time/step"):
        record = history.steps[int(step)]
        shares = [_float_or_zero(record.get(f"time/{part}")) for part in TIME_PARTS]
        rows.append((step, [s * seconds * 1e3 for s in [*shares, max(0.0, 1.0 - sum(shares))]]))
    sums = [sum(column) for column in zip(*(parts for _, parts in rows), strict=True)]
    total = sum(sums)
    if not total > 0:
        return [], {}
    return rows, {name: part / total for name, part in zip([*TIME_PARTS, "other"], sums, strict=True)}


def _float_or_zero(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
