"""The nodes of a run on several machines, for the run's page."""

from html import escape

from paceline.launch.several_nodes.node_history import HeadLoss, find_head_losses
from paceline.launch.several_nodes.node_stays import NodeStay, describe_ranks, format_utc, read_node_stays
from paceline.reporting.run_history import History


def show_nodes(history: History) -> str:
    """Return a section as HTML: which nodes each attempt had, and why some left; empty for a run on one machine."""
    attempts = read_node_stays(history.run.path)
    losses = find_head_losses(history.run, history.events)
    rows = "".join(
        _row(each.attempt, stay, losses.get(each.attempt) if stay.node == 0 else None)
        for each in attempts
        for stay in each.nodes
    )
    head = "".join(f"<th>{name}</th>" for name in ("attempt", "node", "host", "address", "ranks", "since", "left"))
    table = f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div>'
    return f"<section><h2>Nodes</h2>{table}</section>" if rows else ""


def _row(attempt: int, stay: NodeStay, head_loss: HeadLoss | None) -> str:
    ranks = describe_ranks(stay.ranks).partition(" ")[2]
    left = f"{stay.left_at}: {stay.reason}" if stay.left_at else ""
    if head_loss is not None and not left:
        left = f"{format_utc(head_loss.time)}: {head_loss.reason}"
    cells = (str(attempt), str(stay.node), stay.host, stay.address, ranks, stay.since, left)
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
