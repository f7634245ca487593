"""The checkpoints in the memory of one node: its agent owns their folder, and serves it to the other nodes."""

import os
import shutil
import sys
from pathlib import Path

import msgspec

from paceline.checkpoint.files.peers.memory_server import (
    CompleteRank,
    MemoryEndpoint,
    MemoryServer,
    complete_ranks,
    remove_steps,
)
from paceline.checkpoint.files.peers.peer_checkpoint import PeerPlan
from paceline.checkpoint.files.peers.peer_files import write_endpoint
from paceline.console.output import print_line
from paceline.launch.memory_disk import choose_memory_folder, lock_memory_folder, remove_abandoned_memory_folders


class HeldCheckpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoints in the memory of a node, after an attempt: the ranks whose files are all there."""

    endpoint: MemoryEndpoint
    complete: list[CompleteRank]


class NodeMemory:
    """The memory of one node for checkpoints; `folder` is empty if this machine has none."""

    def __init__(self) -> None:
        self.folder = choose_memory_folder()
        self._server: MemoryServer | None = None
        self._lock = -1
        self._has_failed = False

    def begin_attempt(self, attempt_folder: Path, *, node: int, host: str, plan: PeerPlan | None) -> None:
        """Tell the ranks of all nodes how they reach this memory at `host`, and keep only what the plan uses.

        Without a plan, the attempt uses no memory.

        Raises:
            OSError: the folder of the attempt can't be written.
        """
        if plan is None or not self._open(node=node, host=host):
            return
        assert self._server is not None
        self._server.begin_attempt()
        for path in Path(self.folder).glob("slots-*"):
            shutil.rmtree(path, ignore_errors=True)
        remove_steps(Path(self.folder), kept={plan.kept_step(node)})
        write_endpoint(attempt_folder, node, self._server.endpoint)

    def _open(self, *, node: int, host: str) -> bool:
        """Start to serve the folder, unless that was done before. Return whether this node has a memory.

        If it has none, the ranks of all nodes use none.
        """
        if self._server is not None or self._has_failed:
            return self._server is not None
        remove_abandoned_memory_folders()
        problem = "" if self.folder else "there is no /dev/shm that can be written"
        server = None
        try:
            if self.folder:
                server = MemoryServer(Path(self.folder), host=host)
                self._lock = lock_memory_folder(Path(self.folder))
                self._server = server
                return True
        except OSError as error:
            problem = str(error)
            if server is not None:
                server.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder, self._has_failed = "", True
        print_line(f"no checkpoints in memory, because node {node} has none: {problem}", sys.stderr)
        return False

    def held(self) -> HeldCheckpoints | None:
        """Return what this node has in memory, or None if it has no memory for checkpoints."""
        if self._server is None:
            return None
        return HeldCheckpoints(endpoint=self._server.endpoint, complete=complete_ranks(Path(self.folder)))

    def close(self) -> None:
        """Remove all checkpoints in the memory of this node."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
