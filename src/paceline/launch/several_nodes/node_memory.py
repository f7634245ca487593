"""The checkpoints in the memory of one node: its agent owns their folder, and serves it to the other nodes."""

import os
import shutil
import sys
from pathlib import Path

import msgspec

from paceline.checkpoint.files.peers.memory_server import MemoryEndpoint, MemoryServer
from paceline.checkpoint.files.peers.peer_checkpoint import PeerPlan
from paceline.checkpoint.files.peers.peer_files import write_endpoint
from paceline.checkpoint.files.peers.peer_folder import CompleteRank, complete_ranks, remove_steps
from paceline.console.output import print_line
from paceline.launch.memory_disk import choose_memory_folder, lock_memory_folder, remove_abandoned_memory_folders


class MemoryInventory(msgspec.Struct, frozen=True, kw_only=True):
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

    def begin_attempt(self, *, node: int, host: str, plan: PeerPlan | None) -> str:
        """Keep only what the plan uses, and return the folder for the ranks of this node; "" if they use none.

        Other nodes reach this memory at `host`. Without a plan, the attempt uses no memory.
        """
        if plan is None or not self._open(node=node, host=host):
            return ""
        assert self._server is not None
        self._server.begin_attempt()
        for path in Path(self.folder).glob("slots-*"):
            shutil.rmtree(path, ignore_errors=True)
        remove_steps(Path(self.folder), kept={plan.kept_step(node)})
        return self.folder

    def announce(self, attempt_folder: Path, *, node: int) -> None:
        """Tell the ranks of all nodes how they reach this memory, if there is one.

        Raises:
            OSError: the folder of the attempt can't be written.
        """
        if self._server is not None:
            write_endpoint(attempt_folder, node, self._server.endpoint)

    def _open(self, *, node: int, host: str) -> bool:
        """Serve the folder at `host`, unless it is served there. Return whether this node has a memory.

        If it has none, the ranks of all nodes use none.
        """
        if self._server is not None and self._server.endpoint.host == host:
            return True
        if self._server is None and self._has_failed:
            return False
        problem = "" if self.folder else "there is no /dev/shm that can be written"
        if self.folder:
            try:
                self._serve(host)
            except OSError as error:
                problem = str(error)
        if problem:
            self.close()
            self.folder, self._has_failed = "", True
            print_line(f"no checkpoints in memory, because node {node} has none: {problem}", sys.stderr)
        return not problem

    def _serve(self, host: str) -> None:
        """Start to serve the folder, or, for the head that was alone before, at another address.

        Raises:
            OSError: the folder can't be written, or this machine has no such address.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
        else:
            remove_abandoned_memory_folders()
        self._server = MemoryServer(Path(self.folder), host=host)
        if self._lock < 0:
            self._lock = lock_memory_folder(Path(self.folder))

    def inventory(self) -> MemoryInventory | None:
        """Return what this node has in memory, or None if it has no memory for checkpoints."""
        if self._server is None:
            return None
        return MemoryInventory(endpoint=self._server.endpoint, complete=complete_ranks(Path(self.folder)))

    def close(self) -> None:
        """Remove all checkpoints in the memory of this node."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
