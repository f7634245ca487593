"""A rank's part of the checkpoints in memory: the training waits for a copy, and a thread does the rest."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import STAGING_PREFIX, step_name
from paceline.checkpoint.files.manifest import Files
from paceline.checkpoint.files.memory_slots import MemorySlots, WrittenFile
from paceline.checkpoint.files.two_phase_commit import discard_staging_folder, total_bytes
from paceline.comm.collective_errors import gather_on_all_ranks, run_on_all_ranks
from paceline.comm.process_group import World
from paceline.errors import CheckpointError
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.trainer.saving.background_thread import BackgroundThread
from paceline.trainer.saving.space_checks import require_free_memory

WORK_FOLDER = "slots"


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoint:
    """A checkpoint in memory: the path that it has once it is committed, and the size of its tensors in bytes."""

    path: Path
    num_bytes: int


class RankMemory(ABC):
    """The checkpoints in memory of one rank, in the folder `path` of /dev/shm, which the ranks of a machine share.

    `attempt` is the number of this attempt.
    """

    def __init__(self, path: Path, *, world: World, attempt: int) -> None:
        self.path = path
        self.background_seconds = 0.0
        """The processor time that the thread of this rank took for the last checkpoint."""
        self._world = world
        self._work_folder = path / f"{WORK_FOLDER}-{attempt}"
        self._slots = MemorySlots(self._work_folder / f"rank-{world.rank}")
        self._thread = BackgroundThread("paceline-memory")
        self._has_checked_memory = False

    def write(self, *, step: int, files: Files, state: Mapping[str, Any]) -> MemoryCheckpoint:
        """Write a checkpoint. Every rank calls this with its `files`, and rank 0 writes its `state`.

        A failure on one rank is raised on all. So is a failure to complete the checkpoint before.

        Raises:
            CheckpointError: there is not enough memory, or a file can't be written.
        """
        staging = self._staging_folder(step)
        try:
            if not self._has_checked_memory:
                self._check_memory(total_bytes(files))
            written, sizes = gather_on_all_ranks(self._world, partial(self._copy, staging, files))
            self._complete(staging, written, step=step, state=state)
        except CheckpointError:
            self._slots.remove()
            self._discard_unfinished()
            raise
        return MemoryCheckpoint(path=self.path / step_name(step), num_bytes=sum(sizes))

    def wait_until_committed(self) -> None:
        """Wait until the last checkpoint is complete, but leave a failure to the next save. Every rank calls this."""
        self._thread.is_idle(seconds=self._world.timeout_seconds)
        self._world.barrier()

    def close(self) -> None:
        """Wait until nothing is written any more. A failure is not raised, because the run has ended in another way."""
        self._thread.close()

    @abstractmethod
    def _staging_folder(self, step: int) -> Path:
        """Return the folder for the files of an unfinished checkpoint."""

    @abstractmethod
    def _checked_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the sizes, of those of all ranks, for which this rank checks the memory; none if another rank does."""

    @abstractmethod
    def _num_copies(self) -> int:
        """Return how many copies of a checkpoint are in memory at most."""

    @abstractmethod
    def _complete(
        self, staging: Path, written: Mapping[str, WrittenFile], *, step: int, state: Mapping[str, Any]
    ) -> None:
        """Let the thread complete a checkpoint of which this rank has `written` its files. All ranks have theirs."""

    def _create(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)

    def _check_memory(self, num_bytes: int) -> None:
        """Check that there is memory for all checkpoints. This rank writes `num_bytes` bytes of each."""
        sizes = self._checked_sizes(self._world.gather_json(num_bytes))
        check = partial(require_free_memory, self.path, sizes, num_copies=self._num_copies())
        run_on_all_ranks(self._world, lambda: check() if sizes else None)
        self._has_checked_memory = True

    def _copy(self, staging: Path, files: Files) -> tuple[dict[str, WrittenFile], int]:
        """Copy this rank's tensors into the staging folder, and return the files and their size."""
        self._thread.wait()
        with convert_to_save_error("a checkpoint in memory", self.path):
            self._create()
            staging.mkdir(exist_ok=True)
            return self._slots.write(staging, files), total_bytes(files)

    def _discard_unfinished(self) -> None:
        """Remove what a failed save left, also that of the checkpoint before."""
        for unfinished in self.path.glob(f"{STAGING_PREFIX}*"):
            discard_staging_folder(unfinished)
