"""The forecast of a run and the measurements of its first steps, for the run's page."""

from html import escape
from typing import Any

from paceline.console.formatting import format_duration, format_size
from paceline.reporting.run_history import History
from paceline.reporting.svg.bar_chart import BarRow, bars

_SOURCES = {
    "auto": "the plan that chose the layout",
    "plan": "the last plan of the job",
    "timed": "steps that a plan of the job timed here",
}
_MEASURED = "measured"


def show_foretold(history: History) -> str:
    """Show forecast and measured bytes and seconds side by side; return '' if nothing was forecast."""
    event = history.last_of("Foretold")
    try:
        return _section(event) if event else ""
    except (KeyError, TypeError, ValueError):  # a line that was cut off by a kill, or written by another version
        return ""


def _section(event: dict[str, Any]) -> str:
    measured, parts = event["measured_bytes"], {name: float(value) for name, value in event["parts"].items() if value}
    by = "the device's allocator" if event["measured_by"] == "allocator" else "growth of the resident memory"
    rows = [
        ("peak bytes of the fullest rank", format_size(event["peak_bytes"]), "" if measured is None else format_size(measured),
         event["memory_ratio"], by if measured is not None else "unknown"),
        ("seconds per step", format_duration(event["step_seconds"]), format_duration(event["measured_seconds"]),
         event["time_ratio"], "the median of the first steps"),
    ]  # fmt: skip
    cells = "".join(
        f"<tr><td>{name}</td><td>{forecast}</td><td>{found}</td>"
        f"<td>{'–' if ratio is None else f'{ratio:.2f}'}</td><td>{escape(how)}</td></tr>"
        for name, forecast, found, ratio, how in rows
    )
    kinds = [*parts, _MEASURED]
    drawn = [BarRow(name="forecast", parts=parts)]
    drawn += [] if measured is None else [BarRow(name=_MEASURED, parts={_MEASURED: float(measured)})]
    small = "" if measured is None or event["memory_ratio"] is not None else (
        "<p>A process keeps more than its tensors; of a forecast below 512 MiB that would be most of it, so the two are "
        "not divided.</p>"
    )  # fmt: skip
    had = float(event.get("others", 0.0))
    busy = (
        f"<p>Other programs used {had:.0%} of the cores meanwhile: without them steps may be faster.</p>" if had else ""
    )
    source = _SOURCES.get(str(event["source"]), str(event["source"]))
    return (
        f"<section><h2>Forecast and measured</h2><p>By {escape(source)}, for {escape(str(event['layout']))}; measured "
        f"until step {int(event['step'])}.</p><table><tr><th></th><th>forecast</th><th>measured</th><th>times</th>"
        f"<th>measured by</th></tr>{cells}</table>{small}{busy}{bars('peak bytes of the fullest rank', kinds, drawn)}</section>"
    )
