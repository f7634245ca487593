"""The curves of a run, and the split of its time."""

from collections.abc import Sequence
from html import escape

from paceline.reporting.run_history import History, ResumeMark
from paceline.reporting.svg.charts import Curve, chart, split_chart, stacked_bar

PARTS = ("compute", "communication", "data", "evaluation", "checkpoint")
_SPEED = ("tokens_per_second", "samples_per_second", "mfu")
_MOST_STATISTICS = 48
_TERM = "loss/"


def show_curves(history: History) -> str:
    """Draw losses, metrics, speed, memory and samples over steps."""
    names, marks = history.names(), history.marks()
    charts = [chart("loss", _losses(history, names), marks=marks)]
    charts += [_one(history, name, marks) for name in names if name.startswith(_TERM)]
    charts += [_one(history, name, marks) for name in names if name.startswith(("eval/", "test/"))]
    charts += [_one(history, name, marks) for name in ("grad_norm", "lr", *_SPEED) if name in names]
    charts.append(chart("samples seen", [Curve(name="samples", points=history.samples())], marks=marks))
    charts.append(_one(history, "memory/peak_gib", marks, title="peak memory of a rank, GiB"))
    drawn = "".join(charts)
    again = f'<p class="soft">{history.again} logged steps were done again after a resume; their last numbers are drawn.</p>'
    note = again if history.again else ""
    return f'<section><h2>Curves</h2>{note}<div class="charts">{drawn}</div></section>' if drawn else ""


def show_time(history: History) -> str:
    """Draw the time per step, its split over steps, and its split over the run."""
    rows, shares = _split(history)
    if not rows:
        return ""
    seconds = [(step, value * 1e3) for step, value in history.points("time/step")]
    line = chart("time per step, ms", [Curve(name="step", points=seconds)], marks=history.marks())
    split = split_chart("time per step by part, ms", [*PARTS, "other"], rows)
    return f'<section><h2>Where the time went</h2>{stacked_bar(shares)}<div class="charts wider">{line}{split}</div></section>'


def show_statistics(history: History) -> str:
    """Draw the norms of each parameter and its gradient, if they were logged."""
    kinds = ("weight_norm/", "grad_norm/")
    names = [name for name in history.names() if name.startswith(kinds)]
    if not names:
        return ""
    members = list(dict.fromkeys(name.partition("/")[2] for name in names))
    shown = members[: _MOST_STATISTICS // 2]
    charts = "".join(_one(history, kind + member, ()) for member in shown for kind in kinds if kind + member in names)
    left = f"<p>{len(members) - len(shown)} more are in metrics.jsonl.</p>" if len(members) > len(shown) else ""
    title = f"Norms of {len(members)} parameters and their gradients"
    return f'<section><details><summary>{escape(title)}</summary>{left}<div class="charts">{charts}</div></details></section>'


def _losses(history: History, names: Sequence[str]) -> list[Curve]:
    curves = [Curve(name="training", points=history.points("loss"))]
    if "eval/loss" in names:
        curves.append(Curve(name="evaluation", points=history.points("eval/loss")))
    return curves


def _one(history: History, name: str, marks: Sequence[ResumeMark], *, title: str = "") -> str:
    return chart(title or name, [Curve(name=name, points=history.points(name))], marks=marks)


def _split(history: History) -> tuple[list[tuple[float, list[float]]], dict[str, float]]:
    """Return the milliseconds of each part for each logged step, and each part's share of the whole."""
    rows = []
    for step, seconds in history.points("time/step"):
        record = history.steps[int(step)]
        shares = [_share(record.get(f"time/{part}")) for part in PARTS]
        rows.append((step, [s * seconds * 1e3 for s in [*shares, max(0.0, 1.0 - sum(shares))]]))
    sums = [sum(column) for column in zip(*(parts for _, parts in rows), strict=True)]
    whole = sum(sums)
    if not whole > 0:
        return [], {}
    return rows, {name: part / whole for name, part in zip([*PARTS, "other"], sums, strict=True)}


def _share(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
