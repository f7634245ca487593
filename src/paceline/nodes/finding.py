"""Findings: what is wrong with a machine or a link, and what to do."""

from collections.abc import Mapping, Sequence

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


def distinct_hosts(hosts: Mapping[int, str], addresses: Mapping[int, str]) -> dict[int, str]:
    """Return the names of machines by which they differ: the host, and the address if the host alone is not enough.

    For example, two machines that are called ip-10 are "ip-10 at 10.0.0.1" and "ip-10 at 10.0.0.2". Processes that play
    several nodes on one machine have one address.
    """
    addresses_by_host: dict[str, set[str]] = {}
    for node, host in hosts.items():
        addresses_by_host.setdefault(host, set()).add(addresses.get(node, ""))
    return {
        node: f"{host} at {addresses[node]}" if len(addresses_by_host[host]) > 1 and addresses.get(node) else host
        for node, host in hosts.items()
    }
