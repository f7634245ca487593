"""How late an asynchronous run's updates were, for its page."""

from collections.abc import Mapping
from html import escape
from typing import Any

from paceline.spec.words import many, size
from paceline.watch.history import History

_WIDE, _HIGH = 220, 12


def show_late(history: History) -> str:
    """A row for each participant: a bar of its gradients by how many updates late they were."""
    event = history.last_of("Staleness")
    told = [each for each in event.get("told", []) if isinstance(each, dict) and each.get("late")]
    if not told:
        return ""
    most = max(late for each in told for late, _ in each["late"])
    heads = "".join(f"<th>{late} late</th>" for late in range(most + 1))
    rows = "".join(_row(each, most) for each in told)
    return (
        f"<section><h2>How late updates were</h2><p>update {escape(str(event.get('update')))}, as far as step "
        f"{event.get('step')}: microbatches by how many updates lay between the weights they were computed on and their "
        f"own.</p><table><tr><th></th><th></th>{heads}<th>held at once</th><th>sent</th></tr>{rows}</table></section>"
    )


def _row(told: Mapping[str, Any], most: int) -> str:
    counts = {int(late): int(count) for late, count in told["late"]}
    total = sum(counts.values()) or 1
    cells = "".join(f"<td>{counts.get(late, 0) / total:.1%}</td>" for late in range(most + 1))
    held = many(int(told["versions"]), "version")
    return (
        f"<tr><td>{escape(str(told['who']))}</td><td>{_bar(counts, total)}</td>{cells}"
        f"<td>{held}</td><td>{size(int(told['sent_bytes']))}</td></tr>"
    )


def _bar(counts: Mapping[int, int], total: int) -> str:
    x, drawn = 0.0, ""
    for late, count in sorted(counts.items()):
        wide = _WIDE * count / total
        said = f"{many(count, 'microbatch')} {many(late, 'update')} late"
        drawn += f'<rect x="{x:.1f}" y="0" width="{wide:.1f}" height="{_HIGH}" class="fill{late % 6}"><title>{said}</title></rect>'
        x += wide
    return f'<svg viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" role="img">{drawn}</svg>'
