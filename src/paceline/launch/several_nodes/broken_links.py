"""Links between nodes that no longer work: a rank that loses its connection does not know which link it was."""

import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.checkpoint.files.peers.memory_server import MemoryEndpoint
from paceline.checkpoint.files.peers.peer_files import endpoint_path
from paceline.filesystem.atomic_files import read_json
from paceline.launch.failures.failure_record import CONNECTION, TIMEOUT, Failure, read_failure

_CONNECT_SECONDS = 2.0
_MAX_THREADS = 32


class BrokenLink(msgspec.Struct, frozen=True, kw_only=True):
    """A node that another one can't reach, and what the kernel says."""

    node: int
    problem: str


def find_broken_links(
    attempt_folder: Path, failure: Failure | None, *, own_node: int, nodes: Sequence[int]
) -> list[BrokenLink]:
    """Return the links from this node that don't work; none unless a rank lost its connection, on any node.

    `failure` is the one of this node. The agents of the other nodes listen for copies of checkpoints in memory. Without
    these, nothing is found.
    """
    if not _may_come_from_link(failure) and (failure is not None or not _has_lost_connection(attempt_folder)):
        return []
    others = [node for node in nodes if node != own_node]
    with ThreadPoolExecutor(min(_MAX_THREADS, len(others) or 1)) as pool:
        problems = pool.map(lambda node: _problem(endpoint_path(attempt_folder, node)), others)
        return [BrokenLink(node=node, problem=text) for node, text in zip(others, problems, strict=True) if text]


def _may_come_from_link(failure: Failure | None) -> bool:
    return failure is not None and (failure.is_lost_connection or failure.kind in (TIMEOUT, CONNECTION))


def _has_lost_connection(attempt_folder: Path) -> bool:
    """Return whether a rank of any node has recorded that it lost its connection.

    The rank that waited for the broken link may still wait, while one of another node has given up. The records are
    opened by their names, because a shared disk may list new files late.
    """
    try:
        num_ranks = int(read_json(attempt_folder / "request.json")["ranks"])
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return any(_may_come_from_link(read_failure(attempt_folder, rank)) for rank in range(num_ranks))


def _problem(path: Path) -> str:
    """Return why the agent with this endpoint can't be reached; "" if it can, or has none."""
    try:
        endpoint = msgspec.json.decode(path.read_bytes(), type=MemoryEndpoint)
    except (OSError, ValueError):
        return ""
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class BrokenLinks:
    """The broken links of an attempt, which the nodes have found at its end."""

    def __init__(self) -> None:
        self._problems: dict[tuple[int, int], str] = {}

    def clear(self) -> None:
        """Begin an attempt."""
        self._problems.clear()

    def find(self, attempt_folder: Path | None, failure: Failure | None, *, nodes: Sequence[int]) -> None:
        """Find and record those of the head."""
        if attempt_folder is not None:
            self.record(0, find_broken_links(attempt_folder, failure, own_node=0, nodes=nodes))

    def record(self, node: int, links: Iterable[BrokenLink]) -> None:
        """Record what a node has found."""
        self._problems |= {(node, link.node): link.problem for link in links}

    def name_in(self, failure: Failure, *, members: Collection[int], describe: Callable[[int], str]) -> Failure:
        """Return the failure with each link whose nodes are both there. Nobody reaches a node that is lost."""
        pairs = {(min(pair), max(pair)): problem for pair, problem in self._problems.items()}
        links = [
            f"the link between {describe(first)} and {describe(second)} does not work: {problem}"
            for (first, second), problem in sorted(pairs.items())
            if {first, second} <= {0, *members}
        ]
        return replace(failure, broken_links=links)
