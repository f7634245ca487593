"""The staleness of an asynchronous run's updates, for the run's page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.console.formatting import format_duration, format_size, plural
from paceline.reporting.run_history import History
from paceline.reporting.svg.charts import INKS

_WIDE, _HIGH = 220, 12
_MOST_COLUMNS = 8


def show_staleness(history: History) -> str:
    """Show one row per participant: a bar of its gradients, grouped by how many updates late they were."""
    event = history.last_of("Staleness")
    met = [each for each in event.get("told", []) if isinstance(each, dict) and "waited_seconds" in each]
    if met:
        return _met(event, met)
    told = [each for each in event.get("told", []) if isinstance(each, dict) and each.get("late")]
    if not told:
        return ""
    most = max(late for each in told for late, _ in each["late"])
    shown = min(most, _MOST_COLUMNS)
    heads = "".join(f'<th><i class="box{_ink(late)}"></i>{late} late</th>' for late in range(shown + 1))
    heads += f'<th><i class="box{_ink(most)}"></i>more</th>' if most > shown else ""
    held = all("versions" in each for each in told)
    one = "microbatch" if held else "gradient"
    heads += "<th>held at once</th><th>sent</th>" if held else ""
    rows = "".join(_row(each, shown, more=most > shown, one=one) for each in told)
    return (
        f"<section><h2>How late updates were</h2><p>{_what(event)}: {plural(2, one).removeprefix('2 ')} by how many "
        f"updates lay between the weights they were computed on and their own update.{_lost(told[0])}</p>"
        f"<table><tr><th></th><th></th>{heads}</tr>{rows}</table></section>"
    )


def _met(event: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(each['who']))}</td><td>{format_size(int(each['sent_bytes']))}</td>"
        f"<td>{format_duration(float(each['waited_seconds']))}</td></tr>"
        for each in told
    )
    return (
        f"<section><h2>Synchronisation of the sites</h2><p>{_what(event)}: what each rank has sent to the other sites, and how "
        f"long it has waited for them.</p><table><tr><th></th><th>sent</th><th>waited</th></tr>{rows}</table></section>"
    )


def _what(event: Mapping[str, Any]) -> str:
    return f"update {escape(str(event.get('update')))}, from the start of this attempt to step {event.get('step')}"


def _lost(told: Mapping[str, Any]) -> str:
    if "lost" not in told:
        return ""
    return (
        f" {int(told['lost']):,} of {int(told['made']):,} additions to the shadow counters were lost: a proxy for how often "
        "two workers wrote at once."
    )


def _row(told: Mapping[str, Any], shown: int, *, more: bool, one: str) -> str:
    counts = {int(late): int(count) for late, count in told["late"]}
    total = sum(counts.values()) or 1
    shares = [counts.get(late, 0) / total for late in range(shown + 1)]
    cells = "".join(f"<td>{share:.1%}</td>" for share in [*shares, *([1 - sum(shares)] if more else [])])
    if "versions" in told:
        cells += f"<td>{plural(int(told['versions']), 'version')}</td><td>{format_size(int(told['sent_bytes']))}</td>"
    return f"<tr><td>{escape(str(told['who']))}</td><td>{_bar(counts, total, one)}</td>{cells}</tr>"


def _ink(late: int) -> int:
    """Return the colour of a lateness; all values beyond the last colour share it."""
    return min(late, INKS - 1)


def _bar(counts: Mapping[int, int], total: int, one: str) -> str:
    x, drawn = 0.0, ""
    for late, count in sorted(counts.items()):
        wide = _WIDE * count / total
        said = f"{plural(count, one)} {plural(late, 'update')} late"
        drawn += f'<rect x="{x:.1f}" y="0" width="{wide:.1f}" height="{_HIGH}" class="fill{_ink(late)}"><title>{said}</title></rect>'
        x += wide
    return f'<svg viewBox="0 0 {_WIDE} {_HIGH}" style="width:{_WIDE}px" role="img">{drawn}</svg>'
