"""The forecast of a run and the measurements of its first steps, for the run's page."""

from html import escape
from typing import Any

from paceline.console.formatting import format_duration, format_size
from paceline.reporting.run_history import History
from paceline.reporting.svg.bar_chart import BarRow, draw_bars

_SOURCES = {
    "auto": "the plan that chose the layout",
    "plan": "the last plan of the job",
    "timed": "steps that a plan of the job timed here",
}
_MEASURED = "measured"


def show_forecast(history: History) -> str:
    """Return a table of forecast and measured bytes and seconds as HTML; '' if the run has no forecast."""
    event = history.last_event("Foretold")  # the name of `ForecastChecked` in events.jsonl
    try:
        return _section(event) if event else ""
    except (KeyError, TypeError, ValueError):  # the line was truncated by a kill, or written by another version
        return ""


def _section(event: dict[str, Any]) -> str:
    measured, parts = event["measured_bytes"], {name: float(value) for name, value in event["parts"].items() if value}
    method = "the device's allocator" if event["measured_by"] == "allocator" else "growth of the resident memory"
    rows = [
        ("peak bytes of the fullest rank", format_size(event["peak_bytes"]), "" if measured is None else format_size(measured),
         event["memory_ratio"], method if measured is not None else "unknown"),
        ("seconds per step", format_duration(event["step_seconds"]), format_duration(event["measured_seconds"]),
         event["time_ratio"], "the median of the first steps"),
    ]  # fmt: skip
    cells = "".join(
        f"<tr><td>{name}</td><td>{forecast}</td><td>{measurement}</td>"
        f"<td>{'–' if ratio is None else f'{ratio:.2f}'}</td><td>{escape(method)}</td></tr>"
        for name, forecast, measurement, ratio, method in rows
    )
    kinds = [*parts, _MEASURED]
    bar_rows = [BarRow(name="forecast", parts=parts)]
    bar_rows += [] if measured is None else [BarRow(name=_MEASURED, parts={_MEASURED: float(measured)})]
    small_note = "" if measured is None or event["memory_ratio"] is not None else (
        "<p>No ratio is shown for memory: with a forecast below 512 MiB, most of a process's memory is not for tensors.</p>"
    )  # fmt: skip
    other_load = float(event.get("others", 0.0))
    load_note = (
        f"<p>Other programs used {other_load:.0%} of the cores meanwhile: without them steps may be faster.</p>"
        if other_load
        else ""
    )
    source = _SOURCES.get(str(event["source"]), str(event["source"]))
    return (
        f"<section><h2>Forecast and measured</h2><p>The layout is {escape(str(event['layout']))}. The forecast comes from "
        f"{escape(source)}. The measurement ended at step {int(event['step'])}.</p><table><tr><th></th><th>forecast</th><th>measured</th><th>measured / forecast</th>"
        f"<th>measured by</th></tr>{cells}</table>{small_note}{load_note}{draw_bars('peak bytes of the fullest rank', kinds, bar_rows)}</section>"
    )
