"""A checkpoint in the memory of several nodes: which nodes hold its files, and the manifest, which comes last.

Nobody commits such a checkpoint when it is written. After a failure, the head looks for the newest step of which all
files are left on some node, writes the manifest, and tells all ranks where the files are.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint, open_checkpoint, step_name
from paceline.checkpoint.files.manifest import MANIFEST, write_manifest
from paceline.checkpoint.files.peers.peer_files import PeerFiles
from paceline.checkpoint.files.peers.peer_folder import entries_file
from paceline.checkpoint.files.resharding_reader import check_digests
from paceline.errors import CheckpointError
from paceline.filesystem.atomic_files import parse_json

NO_STEP = -1


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """The nodes of an attempt that hold checkpoints in memory for each other, and the checkpoint to continue from.

    `nodes` are their numbers in the order of their ranks, and `node` is the one of this process. `step` is the step of
    the checkpoint, or -1, and `sources` has the nodes that hold each of its files, the manifest included.
    """

    nodes: tuple[int, ...]
    node: int = 0
    step: int = NO_STEP
    sources: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return asdict(self)

    def kept_step(self, node: int) -> int:
        """Return the step of the checkpoint whose files a node should keep; -1 if it has none that are used."""
        return self.step if any(node in nodes for nodes in self.sources.values()) else NO_STEP

    def neighbours(self, count: int) -> list[int]:
        """Return the `count` nodes after this one, or all others if there are fewer."""
        own = self.nodes.index(self.node)
        return [*self.nodes[own + 1 :], *self.nodes[:own]][:count]


def parse_plan(value: Mapping[str, Any]) -> PeerPlan:
    """Return the plan from the JSON of `PeerPlan.as_json`."""
    return msgspec.convert(value, PeerPlan)


class RankEntries(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the last file that a rank writes: the manifest's entries of its other files; rank 0's has `state`.

    The state is JSON as text.
    """

    files: dict[str, dict[str, Any]]
    state: str = ""


def write_peer_manifest(
    folder: Path, *, step: int, holders: Mapping[int, tuple[int, ...]], read: Callable[[tuple[int, ...], str], bytes]
) -> Mapping[str, tuple[int, ...]]:
    """Write the manifest of a checkpoint to the memory of this node, and return which nodes hold each of its files.

    `holders` has the nodes that hold the files of each rank, and `read(nodes, name)` reads a file from one of them.

    Raises:
        CheckpointError: the files do not add up to a checkpoint.
        OSError, ValueError: the entries of a rank can't be read.
    """
    path, state = folder / step_name(step), ""
    sources: dict[str, tuple[int, ...]] = {MANIFEST: (0,)}
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    file_entries: dict[str, Any] = {}
    for rank, nodes in sorted(holders.items()):
        content = read(nodes, entries_file(rank, world_size=len(holders)))
        entries = msgspec.json.decode(content, type=RankEntries)
        file_entries |= entries.files
        sources |= dict.fromkeys(entries.files, nodes)
        state = entries.state or state
    write_manifest(path, file_entries=file_entries, state=parse_json(state.encode()), step=step)
    return sources


def write_rank_entries(path: Path, *, file_entries: Mapping[str, Any], state: str) -> None:
    """Write what `RankEntries` describes."""
    path.write_text(json.dumps({"files": file_entries, "state": state}))


def open_peer_checkpoint(folder: Path, plan: PeerPlan, files: PeerFiles, *, share: tuple[int, int]) -> OpenCheckpoint:
    """Open the plan's checkpoint in this node's memory `folder`. Its files are read from other nodes when needed.

    Each node first compares all files that it has with their digests, because other nodes will read them, too. `share`
    is the number of this rank among those of its node, and their count: each rank compares its share. A damaged file is
    replaced by the copy of another node.

    Raises:
        CheckpointError: a file is damaged, or no node sends it.
    """
    path = folder / step_name(plan.step)
    obtain = cache(lambda name: files.fetch(plan.sources[name], path / name))
    obtain(MANIFEST)
    opened = open_checkpoint(path, obtain=obtain)
    own = sorted(name for name, nodes in plan.sources.items() if name != MANIFEST and plan.node in nodes)
    for name in own[share[0] :: share[1]]:
        try:
            _check_file(opened, name)
        except CheckpointError:
            others = tuple(node for node in plan.sources[name] if node != plan.node)
            if not others:
                raise
            (path / name).unlink(missing_ok=True)
            files.fetch(others, path / name)
            _check_file(opened, name)
    return opened


def _check_file(opened: OpenCheckpoint, name: str) -> None:
    shards = [shard for stored in opened.files.values() for shard in stored.all_shards() if shard.file.name == name]
    for shard in shards:
        shard.obtain()
    check_digests(shards)
