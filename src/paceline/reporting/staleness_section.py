"""The staleness of an asynchronous run's updates, for the run's page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.console.formatting import format_duration, format_size, plural
from paceline.reporting.run_history import History
from paceline.reporting.svg.charts import NUM_COLORS

_BAR_WIDTH, _BAR_HEIGHT = 220, 12
_MAX_COLUMNS = 8


def show_staleness(history: History) -> str:
    """Return a section as HTML: for each participant, its gradients or microbatches by staleness.

    For local SGD, the section has the bytes that each rank sent to other sites, and the time that it waited for them.
    """
    event = history.last_event("Staleness")
    participants = [item for item in event.get("told", []) if isinstance(item, dict)]
    sites = [site for site in participants if "waited_seconds" in site]
    if sites:
        return _show_sites(event, sites)
    participants = [participant for participant in participants if participant.get("late")]
    if not participants:
        return ""
    max_staleness = max(staleness for participant in participants for staleness, _ in participant["late"])
    max_shown = min(max_staleness, _MAX_COLUMNS)
    headers = "".join(
        f'<th><i class="box{_color_index(staleness)}"></i>staleness {staleness}</th>'
        for staleness in range(max_shown + 1)
    )
    headers += f'<th><i class="box{_color_index(max_staleness)}"></i>more</th>' if max_staleness > max_shown else ""
    has_versions = all("versions" in participant for participant in participants)
    unit = "microbatch" if has_versions else "gradient"
    headers += "<th>most versions in memory</th><th>sent</th>" if has_versions else ""
    has_overflow = max_staleness > max_shown
    rows = "".join(_row(participant, max_shown, has_overflow=has_overflow, unit=unit) for participant in participants)
    return (
        f"<section><h2>Staleness of updates</h2><p>{_describe_period(event)}: {plural(2, unit).removeprefix('2 ')} by staleness, the number of "
        f"updates between the weights that a {unit} used and its own update.{_lost_additions_text(participants[0])}</p>"
        f"<table><tr><th></th><th></th>{headers}</tr>{rows}</table></section>"
    )


def _show_sites(event: Mapping[str, Any], sites: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(site['who']))}</td><td>{format_size(int(site['sent_bytes']))}</td>"
        f"<td>{format_duration(float(site['waited_seconds']))}</td></tr>"
        for site in sites
    )
    return (
        f"<section><h2>Synchronisation of the sites</h2><p>{_describe_period(event)}: the bytes that each rank sent to the other sites, and the "
        f"time that it waited for them.</p><table><tr><th></th><th>sent</th><th>waited</th></tr>{rows}</table></section>"
    )


def _describe_period(event: Mapping[str, Any]) -> str:
    return f"update {escape(str(event.get('update')))}, from the start of this attempt to step {event.get('step')}"


def _lost_additions_text(participant: Mapping[str, Any]) -> str:
    if "lost" not in participant:
        return ""
    return (
        f" {int(participant['lost']):,} of {int(participant['made']):,} additions to the shadow counters were lost: a proxy for how often "
        "two workers wrote at once."
    )


def _row(participant: Mapping[str, Any], max_shown: int, *, has_overflow: bool, unit: str) -> str:
    counts = {int(staleness): int(count) for staleness, count in participant["late"]}
    total = sum(counts.values()) or 1
    shares = [counts.get(staleness, 0) / total for staleness in range(max_shown + 1)]
    cells = "".join(f"<td>{share:.1%}</td>" for share in [*shares, *([1 - sum(shares)] if has_overflow else [])])
    if "versions" in participant:
        cells += f"<td>{plural(int(participant['versions']), 'version')}</td><td>{format_size(int(participant['sent_bytes']))}</td>"
    return f"<tr><td>{escape(str(participant['who']))}</td><td>{_bar(counts, total, unit)}</td>{cells}</tr>"


def _color_index(staleness: int) -> int:
    """Return the colour index of a staleness; all values beyond the last colour share it."""
    return min(staleness, NUM_COLORS - 1)


def _bar(counts: Mapping[int, int], total: int, unit: str) -> str:
    x, shapes = 0.0, ""
    for staleness, count in sorted(counts.items()):
        width = _BAR_WIDTH * count / total
        tooltip = f"{plural(count, unit)} with a staleness of {plural(staleness, 'update')}"
        shapes += f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="{_BAR_HEIGHT}" class="fill{_color_index(staleness)}"><title>{tooltip}</title></rect>'
        x += width
    return f'<svg viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" style="width:{_BAR_WIDTH}px" role="img">{shapes}</svg>'
