"""Findings: what is wrong with a machine or a link, and what to do."""

from collections.abc import Sequence

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of trouble. `nodes` has the nodes that a run should leave out until it is mended.

    A note (`is_note`) is something to know that is probably no trouble. It does not change the exit code.
    """

    what: str
    hint: str
    nodes: tuple[int, ...] = ()
    is_note: bool = False
    refusal_code: int = 0
    """The exit code with which a training refuses to start because of it; 0 if it only warns."""
    kind: str = ""
    """The kind of trouble, equal for all machines that have it; empty if the nodes differ in something."""


def format_nodes(numbers: Sequence[int]) -> str:
    """Return "node 1", or "nodes 0, 2"."""
    return f"{'node' if len(numbers) == 1 else 'nodes'} {', '.join(map(str, sorted(numbers)))}"
