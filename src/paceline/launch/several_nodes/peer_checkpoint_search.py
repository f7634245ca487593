"""The checkpoints in the memory of all nodes as the head sees them: the newest one that is still complete."""

import http.client
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import newest_step, step_name
from paceline.checkpoint.files.peers.peer_checkpoint import NO_STEP, PeerPlan, write_peer_manifest
from paceline.checkpoint.files.peers.peer_files import read_peer_file
from paceline.console.output import print_line
from paceline.errors import CheckpointError
from paceline.launch.several_nodes.node_memory import MemoryInventory, NodeMemory

_EVERY = "checkpoint.memory_every"
_READ_SECONDS = 10.0  # for the entries of one rank


class PeerCheckpointSearch:
    """The checkpoints that each node had in memory after the last attempt. `own` is the memory of the head."""

    def __init__(self) -> None:
        self.own = NodeMemory()
        self._inventories: dict[int, MemoryInventory] = {}

    def record(self, node: int, inventory: MemoryInventory | None) -> None:
        """Record what a node said."""
        if inventory is not None:
            self._inventories[node] = inventory

    def forget(self, node: int) -> None:
        """Forget the memory of a node that is lost."""
        self._inventories.pop(node, None)

    def newest_step(self) -> int:
        """Return the newest step of which all files are in the memory of some nodes; -1 if there is none."""
        return max((step for step in self._steps() if self._holders(step, nodes=self._inventories)), default=NO_STEP)

    def plan(self, nodes: Sequence[int], *, checkpoints: Path, request: Mapping[str, Any]) -> PeerPlan | None:
        """Return the plan of the next attempt, on `nodes`, and forget what was before it; None if it uses no memory.

        It has the newest complete checkpoint, unless one in the folder `checkpoints` is as new. The manifest is written
        to the memory of the head.
        """
        is_used = not request.get("servers") and str(request["payload"].get("settings", {}).get(_EVERY)) != "0"
        plan = self._plan(nodes, newer_than=newest_step(checkpoints)) if is_used else None
        self._inventories.clear()
        return plan

    def _plan(self, nodes: Sequence[int], *, newer_than: int) -> PeerPlan:
        for step in sorted((step for step in self._steps() if step > newer_than), reverse=True):
            if not self.own.folder:  # the manifest can't be written
                break
            holders = self._holders(step, nodes=nodes)
            if not holders:
                continue
            try:
                read = partial(self._read, step)
                sources = write_peer_manifest(Path(self.own.folder), step=step, holders=holders, read=read)
            except (CheckpointError, OSError, ValueError, http.client.HTTPException) as error:
                reason = error.what if isinstance(error, CheckpointError) else error
                print_line(f"the checkpoint of step {step} in memory can't be used: {reason}", sys.stderr)
                continue
            return PeerPlan(nodes=tuple(nodes), step=step, sources=sources)
        return PeerPlan(nodes=tuple(nodes))

    def _steps(self) -> set[int]:
        return {part.step for inventory in self._inventories.values() for part in inventory.complete}

    def _holders(self, step: int, *, nodes: Iterable[int]) -> Mapping[int, tuple[int, ...]]:
        """Return the nodes that hold the files of each rank; nothing if the files of one rank are nowhere."""
        holders: dict[int, tuple[int, ...]] = {}
        world_sizes = set()
        for node in nodes:
            for part in self._inventories[node].complete if node in self._inventories else ():
                if part.step == step:
                    holders[part.rank] = (*holders.get(part.rank, ()), node)
                    world_sizes.add(part.world_size)
        is_complete = len(world_sizes) == 1 and set(holders) == set(range(*world_sizes))
        return holders if is_complete else {}

    def _read(self, step: int, nodes: tuple[int, ...], name: str) -> bytes:
        """Return the content of a file from the first of the nodes that sends it.

        Raises:
            OSError, ValueError, http.client.HTTPException: the error of the last one.
        """
        file = Path(self.own.folder) / step_name(step) / name
        if 0 in nodes:
            return file.read_bytes()
        for node in nodes[:-1]:
            with suppress(OSError, ValueError, http.client.HTTPException):
                return read_peer_file(self._inventories[node].endpoint, file, timeout_seconds=_READ_SECONDS)
        return read_peer_file(self._inventories[nodes[-1]].endpoint, file, timeout_seconds=_READ_SECONDS)
