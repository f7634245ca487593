"""The folder of a command's checkpoints in memory, which the memory tier and saves in the background share."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import list_checkpoints
from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.trainer.setup.build_training_setup import TrainingSetup

_KEPT = 2  # the newest checkpoint, and an older one in case the newest is damaged


class MemoryFolder:
    """The folder in /dev/shm. All ranks write a checkpoint into it, and rank 0 removes the older ones.

    With `keeps_checkpoints`, a restart on the same machine finds the newest checkpoints here. Otherwise a checkpoint is
    removed once it has been copied to disk.
    """

    def __init__(self, path: Path, *, world: World, keeps_checkpoints: bool) -> None:
        self.path = path
        self._world = world
        self._num_kept = _KEPT if keeps_checkpoints else 0
        self._source: Path | None = None

    def write(self, write: Callable[[Path], Path]) -> Path:
        """Let all ranks write a checkpoint with `write(folder)`, remove the older ones, and return its path.

        Raises:
            CheckpointError: the checkpoint could not be written; a failure on one rank is raised on all.
        """
        if self._world.is_main:
            with suppress(OSError):  # then the write fails on all ranks together
                self.path.mkdir(mode=0o700, exist_ok=True)
        checkpoint = write(self.path)
        self._prune(num_kept=max(1, self._num_kept))
        return checkpoint

    def lend(self, checkpoint: Path) -> None:
        """Keep a checkpoint, while it is copied to disk, until `take_back` is called."""
        self._source = checkpoint

    def take_back(self) -> None:
        """End the loan of `lend`: the checkpoint has been copied, or the copy has failed."""
        self._source = None
        self._prune(num_kept=self._num_kept)

    def _prune(self, *, num_kept: int) -> None:
        if not self._world.is_main:
            return
        checkpoints = list_checkpoints(self.path)
        for checkpoint in checkpoints[: len(checkpoints) - num_kept]:
            if checkpoint != self._source:
                with suppress(OSError):
                    shutil.rmtree(checkpoint)


def open_memory_folder(setup: TrainingSetup, task: Task) -> MemoryFolder | None:
    """Return the memory folder of a run, or None if it has none.

    A run has none if its command made no folder for it, if the settings use none, or if the update is asynchronous. An
    asynchronous run completes its steps in flight before each save, so additional saves would change the training.
    """
    checkpoint = setup.settings.checkpoint
    keeps_checkpoints = checkpoint.memory_every != 0
    is_used = keeps_checkpoints or checkpoint.background
    if not task.memory_folder or not is_used or not setup.plan.update_rule.is_synchronous:
        return None
    return MemoryFolder(Path(task.memory_folder), world=setup.world, keeps_checkpoints=keeps_checkpoints)
