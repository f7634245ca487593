"""Checkpoints in memory of a run on several nodes: each rank sends copies of its files to the nodes after its own.

A checkpoint can be used as soon as the last file of each rank is complete on one node that is left. The training waits
for all copies of a checkpoint before it writes the next one, so if a node is lost, the one before is there.
"""

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint, step_name
from paceline.checkpoint.files.memory_slots import WrittenFile, compute_digests
from paceline.checkpoint.files.peers.peer_checkpoint import NO_STEP, PeerPlan, open_peer_checkpoint, write_rank_entries
from paceline.checkpoint.files.peers.peer_files import PeerFiles
from paceline.checkpoint.files.peers.peer_folder import entries_file, remove_steps
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, MachineError
from paceline.events import CheckpointRefused, Event
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.trainer.saving.memory.rank_memory import RankMemory

_KEPT = 2  # the newest checkpoint, and an older one in case the newest is not complete


class PeerMemory(RankMemory):
    """The checkpoints in the memory of several nodes. Each has a folder `path` of its own for its ranks.

    `num_copies` is the number of other nodes that get a copy of each file. The two newest checkpoints are kept: when
    the ranks write one, the one before is complete.
    """

    def __init__(
        self, path: Path, *, world: World, plan: PeerPlan, files: PeerFiles, num_copies: int, attempt: int
    ) -> None:
        super().__init__(path, world=world, attempt=attempt)
        self._ranks_per_node = world.world_size // len(plan.nodes)
        self._neighbours = plan.neighbours(num_copies)
        self._files = files
        self._kept = [plan.step]

    @override
    def _staging_folder(self, step: int) -> Path:
        return self.path / step_name(step)

    @override
    def _checked_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        first = self._world.rank - self._world.rank % self._ranks_per_node
        return sizes[first : first + self._ranks_per_node] if self._world.rank == first else ()

    @override
    def _num_copies(self) -> int:
        return (_KEPT + 1) * (1 + len(self._neighbours))

    @override
    def _complete(
        self, staging: Path, written: Mapping[str, WrittenFile], *, step: int, state: Mapping[str, Any]
    ) -> None:
        self._kept = [*self._kept, step][-_KEPT:]
        remove_steps(self.path, kept=set(self._kept))
        text = json.dumps(state) if self._world.is_main else ""  # the objects may change while the thread works
        self._thread.add(partial(self._publish, staging, written, state=text))

    @override
    def _discard_unfinished(self) -> None:
        remove_steps(self.path, kept=set(self._kept[:1]))

    def _publish(self, staging: Path, written: Mapping[str, WrittenFile], *, state: str) -> None:
        """Compute the digests of this rank's files, and send the files to other nodes. Only the thread calls this.

        Raises:
            SaveError: another node does not take them.
        """
        start_time = time.thread_time()
        entries = staging / entries_file(self._world.rank, world_size=self._world.world_size)
        with convert_to_save_error("a checkpoint in memory", self.path):
            unfinished = entries.with_name(f".unfinished-{entries.name}")
            write_rank_entries(unfinished, file_entries=compute_digests(written), state=state)
            unfinished.rename(entries)
        for node in self._neighbours:
            for name in written:
                self._files.send(node, staging / name)
            self._files.send(node, entries)  # the last one: it says that the others are there
        self.background_seconds = time.thread_time() - start_time


def find_peer_checkpoint(
    folder: Path | None, plan: PeerPlan, files: PeerFiles, *, world: World
) -> tuple[OpenCheckpoint | None, list[Event]]:
    """Open the plan's checkpoint in the memory of the nodes, and compare its files with their digests.

    Every rank calls this. If one rank can't, all return None and an event that says why, and the checkpoint is removed.
    `folder` is None on a node that has no memory.
    """
    if plan.step == NO_STEP:
        return None, []
    opened, problem = None, ""
    ranks_per_node = world.world_size // len(plan.nodes)
    try:
        if folder is None:
            raise CheckpointError(f"node {plan.node} has no memory for checkpoints.")
        opened = open_peer_checkpoint(folder, plan, files, share=(world.rank % ranks_per_node, ranks_per_node))
    except (CheckpointError, MachineError, OSError, LookupError) as error:
        problem = getattr(error, "what", str(error))
    problems = [text for text in world.gather_json(problem) if text]
    if not problems:
        return opened, []
    if folder is None:
        return None, []
    remove_steps(folder, kept=set())
    refused = CheckpointRefused(path=str(folder / step_name(plan.step)), reason=problems[0])
    return None, [refused] if world.is_main else []
