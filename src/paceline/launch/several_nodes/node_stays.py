"""`nodes.json` in the run folder: which nodes each attempt had, where they were, and why some left.

The head writes it.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.filesystem.atomic_files import read_json, write_json
from paceline.nodes.finding import distinct_hosts
from paceline.nodes.line_channel import LineChannel

NODES_FILE = "nodes.json"


class NodeStay(msgspec.Struct, frozen=True, kw_only=True):
    """The stay of a node in an attempt. `left_at` and `reason` are empty if it stayed until the end of the attempt."""

    node: int
    host: str
    address: str
    """The IP address at which the other nodes see it."""
    first_rank: int
    num_ranks: int
    since: str
    """The time at which it began its part, in UTC."""
    left_at: str = ""
    reason: str = ""

    @classmethod
    def begin(cls, node: int, *, host: str, address: str, ranks: range) -> "NodeStay":
        """Return a stay that begins now."""
        return cls(
            node=node, host=host, address=address, first_rank=ranks.start, num_ranks=len(ranks), since=_utc_now()
        )

    @property
    def ranks(self) -> range:
        """The ranks on the node."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


class AttemptNodes(msgspec.Struct, kw_only=True):
    """The nodes of an attempt, in the order in which they came."""

    attempt: int
    nodes: list[NodeStay]

    def host(self, stay: NodeStay) -> str:
        """Return the host of a stay, with its address if another node of the attempt has a host of that name."""
        places = range(len(self.nodes))
        hosts = {at: self.nodes[at].host for at in places}
        return distinct_hosts(hosts, {at: self.nodes[at].address for at in places})[self.nodes.index(stay)]

    def describe(self, stay: NodeStay) -> str:
        """Return the node of a stay with its host and ranks, such as "node 1 (host2, ranks 8-15)"."""
        return f"node {stay.node} ({self.host(stay)}, {describe_ranks(stay.ranks)})"


class NodeStays:
    """The writer of the file. What can't be written is left out: the training goes on without it."""

    def __init__(self) -> None:
        self._path = Path()
        self._attempts: list[AttemptNodes] = []

    def begin_attempt(self, run: Path, attempt: int, stays: Iterable[NodeStay]) -> None:
        """Begin an attempt on these nodes; those of earlier attempts, and earlier commands, stay in the file."""
        self._path = run / NODES_FILE
        earlier = [each for each in read_node_stays(run) if each.attempt < attempt]
        self._attempts = [*earlier, AttemptNodes(attempt=attempt, nodes=list(stays))]
        self._write()

    def arrive(self, stay: NodeStay) -> None:
        """Add a node that takes part in the current attempt from now on."""
        if self._attempts:
            self._attempts[-1].nodes.append(stay)
            self._write()

    def leave(self, node: int, reason: str) -> None:
        """Note that a node is no longer there."""
        for each in reversed(self._attempts[-2:]):  # one that was asked to stop may go once the next attempt has begun
            own = [position for position, stay in enumerate(each.nodes) if stay.node == node]
            if not own:
                continue
            stay = each.nodes[own[-1]]
            if not stay.left_at:
                each.nodes[own[-1]] = msgspec.structs.replace(stay, left_at=_utc_now(), reason=reason)
                self._write()
            return

    def _write(self) -> None:
        with suppress(OSError):
            write_json(self._path, msgspec.to_builtins(self._attempts))


def read_node_stays(run: Path) -> list[AttemptNodes]:
    """Return the nodes of each attempt of a run; none if the file is not there, or can't be read."""
    try:
        return msgspec.convert(read_json(run / NODES_FILE), list[AttemptNodes])
    except (OSError, ValueError, msgspec.ValidationError):
        return []


def lost_node_lines(run: Path, attempt: int) -> list[str]:
    """Return a line about each node that left an attempt, and whether another one has taken its place."""
    lines = []
    for each in read_node_stays(run):
        for at, stay in enumerate(each.nodes if each.attempt == attempt else ()):
            later = next((other for other in each.nodes[at + 1 :] if other.node == stay.node), None)
            again = "" if later is None else f"; in its place since {later.since}: {each.describe(later)}"
            if stay.left_at:
                lines.append(f"{each.describe(stay)} left at {stay.left_at}: {stay.reason}{again}")
    return lines


class NodeNames:
    """The names of the nodes of a run in messages: the host of each, with its address where others have that host."""

    def __init__(self, own_host: str, own_address: str) -> None:
        self.hosts: dict[int, str] = {0: own_host}
        self._addresses: dict[int, str] = {0: own_address}

    def add(self, node: int, host: str, channel: LineChannel) -> None:
        """Add a node, or the one that has taken its place. `channel` leads to it."""
        self.hosts[node], self._addresses[node] = host, channel.peer_address
        self._addresses[0] = self._addresses[0] or channel.own_address

    def __getitem__(self, node: int) -> str:
        return distinct_hosts(self.hosts, self._addresses)[node]


def describe_ranks(ranks: range) -> str:
    """Return the ranks of a node, such as "ranks 8-15"."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start}-{ranks.stop - 1}"


def format_utc(seconds: float) -> str:
    """Return a time in UTC, such as "2026-11-30T10:00:00Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _utc_now() -> str:
    return format_utc(time.time())
