"""The files by which the head and the first parameter server tell each other about lost nodes.

The head writes to the folder of the attempt which nodes are lost. The first server takes back the shares that the
workers of these nodes were computing, and writes how many there were. Both run on node 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from paceline.console.formatting import plural
from paceline.filesystem.atomic_files import read_json, write_json

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


class LossFile(Generic[_Entry]):
    """A file in the folder of an attempt with an entry for each loss, in the order of the losses."""

    def __init__(self, name: str, entry: type[_Entry]) -> None:
        self._name = name
        self._entry = entry

    def write(self, folder: Path, entries: Sequence[_Entry]) -> None:
        """Write the file.

        Raises:
            OSError: the folder can't be written.
        """
        write_json(folder / self._name, [msgspec.to_builtins(entry) for entry in entries])

    def read(self, folder: Path) -> list[_Entry]:
        """Return the entries; none if the file is not there or can't be read."""
        try:
            content: Any = read_json(folder / self._name)
            return msgspec.convert(content, list[self._entry])  # type: ignore[name-defined]
        except (OSError, ValueError, msgspec.ValidationError):
            return []


LOST_NODES = LossFile("lost-nodes.json", LostNode)
"""The nodes that are lost in this attempt. The head writes it."""
LOST_WORK = LossFile("lost-work.json", LostWork)
"""What was lost with each of them. The first server writes it, a little later, so the last entries may be missing."""
