"""The folder of a node's checkpoints in memory: which ranks' files are complete in it.

In the folder of a step, each rank writes the file of `entries_file` last. Whoever copies the files of a rank keeps this
order, so the file says that the others are there.
"""

import re
import shutil
from pathlib import Path

import msgspec

from paceline.checkpoint.files.checkpoint_folder import parse_step, step_name

_ENTRIES = re.compile(r"entries\.rank-([0-9]{4,})-of-([0-9]{4,})\.json")


def entries_file(rank: int, *, world_size: int) -> str:
    """Return the name of the file with a rank's part of the manifest. It is the last file that the rank writes."""
    return f"entries.rank-{rank:04d}-of-{world_size:04d}.json"


class CompleteRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose files of a step are complete, and the number of ranks that wrote the checkpoint."""

    step: int
    rank: int
    world_size: int


def complete_ranks(folder: Path) -> list[CompleteRank]:
    """Return the ranks whose files are complete, for all steps in a memory folder."""
    found = [(path, _ENTRIES.fullmatch(path.name)) for path in sorted(folder.glob("step-*/entries.*"))]
    return [
        CompleteRank(step=parse_step(path.parent), rank=int(match[1]), world_size=int(match[2]))
        for path, match in found
        if match is not None
    ]


def remove_steps(folder: Path, *, kept: set[int]) -> None:
    """Remove the checkpoints of all steps but the `kept` ones from a memory folder."""
    names = {step_name(step) for step in kept}
    for path in folder.glob("step-*"):
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)
