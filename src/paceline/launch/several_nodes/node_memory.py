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

    def begin_attempt(self, attempt_folder: Path, *, node: int, host: str, step: int) -> None:
        """Tell the ranks of all nodes how they reach this memory at `host`, and keep only the checkpoint of `step`.

        Raises:
            OSError: the folder of the attempt can't be written.
        """
        if not self.folder:
            return
        if self._server is None:
            try:
                remove_abandoned_memory_folders()
                self._server = MemoryServer(Path(self.folder), host=host)
                self._lock = lock_memory_folder(Path(self.folder))
            except OSError as error:
                self.folder = ""
                print_line(f"no checkpoints in the memory of node {node}: {error}", sys.stderr)
                return
        self._server.begin_attempt()
        for path in Path(self.folder).glob("slots-*"):
            shutil.rmtree(path, ignore_errors=True)
        remove_steps(Path(self.folder), kept={step})
        write_endpoint(attempt_folder, node, self._server.endpoint)

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
