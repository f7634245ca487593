"""How late an asynchronous run's updates were, for its page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.spec.words import duration, many, size
from paceline.watch.history import History

_WIDE, _HIGH = 220, 12
_MOST_COLUMNS = 8


def show_late(history: History) -> str:
    """A row for each participant: a bar of its gradients by how many updates late they were."""
    event = history.last_of("Staleness")
    met = [each for each in event.get("told", []) if isinstance(each, dict) and "waited_seconds" in each]
    if met:
        return _met(event, met)
    told = [each for each in event.get("told", []) if isinstance(each, dict) and each.get("late")]
    if not told:
        return ""
    most = max(late for each in told for late, _ in each["late"])
    shown = min(most, _MOST_COLUMNS)
    heads = "".join(f"<th>{late} late</th>" for late in range(shown + 1))
    heads += "<th>more</th>" if most > shown else ""
    held = all("versions" in each for each in told)
    heads += "<th>held at once</th><th>sent</th>" if held else ""
    rows = "".join(_row(each, shown, more=most > shown) for each in told)
    return (
        f"<section><h2>How late updates were</h2><p>update {escape(str(event.get('update')))}, as far as step "
        f"{event.get('step')}: microbatches by how many updates lay between the weights they were computed on and their "
        f"own.{_lost(told[0])}</p><table><tr><th></th><th></th>{heads}</tr>{rows}</table></section>"
    )


def _met(event: Mapping[str, Any], told: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(each['who']))}</td><td>{size(int(each['sent_bytes']))}</td>"
        f"<td>{duration(float(each['waited_seconds']))}</td></tr>"
        for each in told
    )
    return (
        f"<section><h2>Meetings of the sites</h2><p>update {escape(str(event.get('update')))}, as far as step "
        f"{event.get('step')}: what each rank has sent to the other sites, and how long it has waited for them.</p>"
        f"<table><tr><th></th><th>sent</th><th>waited</th></tr>{rows}</table></section>"
    )


def _lost(told: Mapping[str, Any]) -> str:
    if "lost" not in told:
        return ""
    return (
        f" {int(told['lost']):,} of {int(told['made']):,} additions to the shadow counters were lost: a proxy for how often "
        "two workers wrote at once."
    )


def _row(told: Mapping[str, Any], shown: int, *, more: bool) -> str:
    counts = {int(late): int(count) for late, count in told["late"]}
    total = sum(counts.values()) or 1
    shares = [counts.get(late, 0) / total for late in range(shown + 1)]
    cells = "".join(f"<td>{share:.1%}</td>" for share in [*shares, *([1 - sum(shares)] if more else [])])
    if "versions" in told:
        cells += f"<td>{many(int(told['versions']), 'version')}</td><td>{size(int(told['sent_bytes']))}</td>"
    return f"<tr><td>{escape(str(told['who']))}</td><td>{_bar(counts, total)}</td>{cells}</tr>"


def _bar(counts: Mapping[int, int], total: int) -> str:
    x, drawn = 0.0, ""
    for late, count in sorted(counts.items()):
        wide = _WIDE * count / total
        said = f"{many(count, 'microbatch')} {many(late, 'update')} late"
        drawn += f'<rect x="{x:.1f}" y="0" width="{wide:.1f}" height="{_HIGH}" class="fill{late % 6}"><title>{said}</title></rect>'
        x += wide
    return f'<svg viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" role="img">{drawn}</svg>'
