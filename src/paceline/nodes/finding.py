"""Findings: what is wrong with a machine or a link, and what to do."""

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of trouble. `nodes` has the nodes that a run should leave out until it is mended."""

    what: str
    hint: str
    nodes: tuple[int, ...] = ()


def format_nodes(numbers: tuple[int, ...] | list[int]) -> str:
    """Return "node 1", or "nodes 0, 2"."""
    return f"{'node' if len(numbers) == 1 else 'nodes'} {', '.join(map(str, sorted(numbers)))}"
