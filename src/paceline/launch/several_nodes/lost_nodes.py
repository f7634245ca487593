"""The files by which the head and the first parameter server tell each other about lost nodes.

The head writes to the folder of the attempt which nodes are lost. The first server takes back the shares that the
workers of these nodes were computing, and writes how many there were. Both run on node 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.console.formatting import plural
from paceline.filesystem.atomic_files import read_json, write_json

_NODES_FILE, _WORK_FILE = "lost-nodes.json", "lost-work.json"
_Entry = TypeVar("_Entry", bound=msgspec.Struct)


class LostNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node without which a run goes on. The workers of parameter servers on it are lost."""

    node: int
    name: str
    """The node with its host and ranks, such as "node 2 (host2, ranks 4-5)"."""
    first_rank: int
    num_ranks: int
    reason: str
    step: int
    """The last step that a server had finished when the node was counted as lost."""
    silent_seconds: float = 0.0
    """The seconds for which nothing had come from the node."""


class LostWork(msgspec.Struct, frozen=True, kw_only=True):
    """The gradients that the workers of a lost node had not pushed. Other workers compute them again."""

    gradients: int
    samples: int

    def describe(self) -> str:
        """Return what was lost, as a clause."""
        if not self.gradients:
            return "its workers were not computing a share, so nothing is lost"
        verb, pronoun = ("is", "it") if self.gradients == 1 else ("are", "them")
        gradients = f"{plural(self.gradients, 'unpushed gradient')} ({plural(self.samples, 'sample')})"
        return f"{gradients} {verb} lost, and other workers compute {pronoun} again"


def write_lost_nodes(folder: Path, nodes: Sequence[LostNode]) -> None:
    """Write which nodes are lost in this attempt, in the order of their losses.

    Raises:
        OSError: the folder can't be written.
    """
    write_json(folder / _NODES_FILE, [msgspec.to_builtins(node) for node in nodes])


def read_lost_nodes(folder: Path) -> list[LostNode]:
    """Return the nodes that are lost in this attempt; none if the file is not there or can't be read."""
    return _read(folder / _NODES_FILE, LostNode)


def write_lost_work(folder: Path, works: Sequence[LostWork]) -> None:
    """Write what was lost with each of the lost nodes, in their order.

    Raises:
        OSError: the folder can't be written.
    """
    write_json(folder / _WORK_FILE, [msgspec.to_builtins(work) for work in works])


def read_lost_work(folder: Path) -> list[LostWork]:
    """Return what was lost with each node, in their order; the server may not have written the last ones yet."""
    return _read(folder / _WORK_FILE, LostWork)


def _read(path: Path, kind: type[_Entry]) -> list[_Entry]:
    try:
        content: Any = read_json(path)
        return msgspec.convert(content, list[kind])  # type: ignore[valid-type]
    except (OSError, ValueError, msgspec.ValidationError):
        return []
