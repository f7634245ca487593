"""The folder of a command's checkpoints in memory, which the memory tier and saves in the background share.

The training waits until all ranks have copied their tensors. Then a thread of each rank computes the digests of its
copy, and the thread of rank 0 commits the checkpoint once all ranks have theirs. A rank that dies in between leaves the
checkpoint uncommitted, and a restart uses the one before.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import STAGING_PREFIX, list_checkpoints, step_name
from paceline.checkpoint.files.manifest import Files, write_manifest
from paceline.checkpoint.files.memory_slots import MemorySlots, WrittenFile, compute_digests
from paceline.checkpoint.files.two_phase_commit import commit_checkpoint, discard_staging_folder, total_bytes
from paceline.comm.collective_errors import gather_on_all_ranks, run_on_all_ranks
from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.errors import CheckpointError, SaveError
from paceline.filesystem.atomic_files import parse_json, write_text
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.launch.memory_disk import LOCKED_RUN, describe_lock
from paceline.trainer.saving.background_thread import BackgroundThread
from paceline.trainer.saving.space_checks import require_free_memory
from paceline.trainer.setup.build_training_setup import TrainingSetup

_KEPT = 2  # the newest checkpoint, and an older one in case the newest is damaged
_WORK_FOLDER = "slots"
_POLL_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class MemoryCheckpoint:
    """A checkpoint in memory: the path that it has once it is committed, and the size of its tensors in bytes."""

    path: Path
    num_bytes: int


class MemoryFolder:
    """The folder in /dev/shm. All ranks write a checkpoint into it, and rank 0 commits it and removes older ones.

    With `keeps_checkpoints`, a restart on the same machine finds the newest checkpoints here. Otherwise a checkpoint is
    removed once it has been copied to disk. The folder names the `run`, so that a later command can remove it if this
    one is killed with all of its processes. `attempt` is the number of this attempt: the files that are only of use to
    the processes of an earlier attempt are removed.
    """

    def __init__(
        self, path: Path, *, world: World, keeps_checkpoints: bool, attempt: int = 1, run: Path | None = None
    ) -> None:
        self.path = path
        self._run = run
        self._world = world
        self._num_kept = _KEPT if keeps_checkpoints else 0
        self._work_folder = path / f"{_WORK_FOLDER}-{attempt}"
        self._slots = MemorySlots(self._work_folder / f"rank-{world.rank}")
        self._thread = BackgroundThread("paceline-memory")
        self._lent: Path | None = None
        self._has_checked_memory = False
        self.background_seconds = 0.0
        """The processor time that the thread of this rank took for the last checkpoint."""
        if world.is_main:
            self._remove_leftovers()

    def write(self, *, step: int, files: Files, state: Mapping[str, Any]) -> MemoryCheckpoint:
        """Write a checkpoint. Every rank calls this with its `files`, and rank 0 writes its `state`.

        A failure on one rank is raised on all. So is a failure to commit the checkpoint before.

        Raises:
            CheckpointError: there is not enough memory, or a file can't be written.
        """
        staging = self.path / f"{STAGING_PREFIX}{step_name(step)}-memory"
        try:
            if not self._has_checked_memory:
                self._check_memory(total_bytes(files))
            written, sizes = gather_on_all_ranks(self._world, partial(self._copy, staging, files))
            self._thread.add(partial(self._digest, written, step=step))
            if self._world.is_main:
                text = json.dumps(state)  # the objects may change while the thread works
                self._thread.add(partial(self._commit, staging, step=step, state=text))
        except CheckpointError:
            self._slots.remove()
            self._discard_unfinished()
            raise
        return MemoryCheckpoint(path=self.path / step_name(step), num_bytes=sum(sizes))

    def add(self, function: Callable[[], None]) -> None:
        """Let the thread call a function after the last checkpoint is committed, unless that fails."""
        self._thread.add(function)

    def complete(self) -> None:
        """Wait until the last checkpoint is committed. Every rank must call this; a failure is raised on all."""
        try:
            run_on_all_ranks(self._world, self._thread.wait)
        except CheckpointError:
            self._discard_unfinished()
            raise

    def wait_until_committed(self) -> None:
        """Wait like `complete`, but leave a failure to the next save. Every rank must call this."""
        self._thread.is_idle(seconds=self._world.timeout_seconds)
        self._world.barrier()

    def lend(self, checkpoint: Path) -> None:
        """Keep a checkpoint until `take_back` is called. Only the thread calls this."""
        self._lent = checkpoint

    def take_back(self) -> None:
        """End the loan of `lend`."""
        self._thread.add(self._take_back)

    def close(self) -> None:
        """Wait until nothing is written any more. A failure is not raised, because the run has ended in another way."""
        self._thread.close()

    def _check_memory(self, num_bytes: int) -> None:
        """Check that there is memory for all checkpoints. This rank writes `num_bytes` bytes of each."""
        sizes, num_copies = self._world.gather_json(num_bytes), max(1, self._num_kept) + 1
        check = partial(require_free_memory, self.path, sizes, num_copies=num_copies)
        run_on_all_ranks(self._world, lambda: check() if self._world.is_main else None)
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

    def _create(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        record = self.path / LOCKED_RUN
        if self._run is not None and self._world.is_main and not record.exists():
            with suppress(OSError):  # without a lock file, nobody else may remove the folder
                write_text(record, describe_lock(self._run))

    def _digest(self, written: Mapping[str, WrittenFile], *, step: int) -> None:
        """Compute the digests of this rank's files, and write the entries for rank 0; an empty file if that fails."""
        start_time = time.thread_time()
        path = self._entries_path(step, self._world.rank)
        with convert_to_save_error("a checkpoint in memory", self.path):
            try:
                self._work_folder.mkdir(mode=0o700, exist_ok=True)
                write_text(path, json.dumps(compute_digests(written)))
            except BaseException:
                path.touch()
                raise
        self.background_seconds = time.thread_time() - start_time

    def _commit(self, staging: Path, *, step: int, state: str) -> None:
        """Commit a checkpoint once the entries of all ranks are there, and remove the oldest ones."""
        entries: dict[str, Any] = {}
        try:
            for rank in range(self._world.world_size):
                entries = {**self._read_entries(self._entries_path(step, rank)), **entries}
            with convert_to_save_error("a checkpoint in memory", self.path):
                write_manifest(staging, file_entries=entries, state=json.loads(state), step=step)
                commit_checkpoint(self.path, staging, step=step)
        except BaseException:
            discard_staging_folder(staging)
            raise
        self._prune(num_kept=max(1, self._num_kept))

    def _entries_path(self, step: int, rank: int) -> Path:
        return self._work_folder / f"entries-{step}-{rank}.json"

    def _read_entries(self, path: Path) -> dict[str, Any]:
        """Return the entries that a rank wrote, and remove its file.

        Raises:
            SaveError: the rank has not written them in time, or could not compute them.
        """
        deadline = time.monotonic() + self._world.timeout_seconds
        while not path.exists():
            if time.monotonic() > deadline:
                raise SaveError("a rank did not compute the digests of its checkpoint in memory.", where=str(path))
            time.sleep(_POLL_SECONDS)
        with convert_to_save_error("a checkpoint in memory", self.path):
            text = path.read_bytes()
            path.unlink()
        if not text:
            raise SaveError("a rank could not compute the digests of its checkpoint in memory.", where=str(path))
        entries: dict[str, Any] = parse_json(text)
        return entries

    def _take_back(self) -> None:
        self._lent = None
        self._prune(num_kept=self._num_kept)

    def _prune(self, *, num_kept: int) -> None:
        checkpoints = list_checkpoints(self.path)
        for checkpoint in checkpoints[: len(checkpoints) - num_kept]:
            if checkpoint != self._lent:
                with suppress(OSError):
                    shutil.rmtree(checkpoint)

    def _remove_leftovers(self) -> None:
        for path in [*self.path.glob(f"{STAGING_PREFIX}*"), *self.path.glob(f"{_WORK_FOLDER}-*")]:
            if path != self._work_folder:
                shutil.rmtree(path, ignore_errors=True)


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
    return MemoryFolder(
        Path(task.memory_folder),
        world=setup.world,
        keeps_checkpoints=keeps_checkpoints,
        attempt=task.attempt,
        run=Path(task.run),
    )
