"""The nodes of a run on several machines, for the run's page."""

from html import escape

from paceline.launch.several_nodes.node_stays import NodeStay, describe_ranks, read_node_stays
from paceline.run_folder.run_folder import RunFolder


def show_nodes(run: RunFolder) -> str:
    """Return a section as HTML: which nodes each attempt had, and why some left; empty for a run on one machine."""
    attempts = read_node_stays(run.path)
    rows = "".join(_row(each.attempt, stay) for each in attempts for stay in each.nodes)
    head = "".join(f"<th>{name}</th>" for name in ("attempt", "node", "host", "address", "ranks", "since", "left"))
    table = f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    return f"<section><h2>Nodes</h2>{table}</section>" if rows else ""


def _row(attempt: int, stay: NodeStay) -> str:
    ranks = describe_ranks(stay.ranks).partition(" ")[2]
    left = f"{stay.left_at}: {stay.reason}" if stay.left_at else ""
    cells = (str(attempt), str(stay.node), stay.host, stay.address, ranks, stay.since, left)
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
