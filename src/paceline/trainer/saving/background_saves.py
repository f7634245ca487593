"""Saves in the background: the training waits for a checkpoint in memory, and a thread of rank 0 copies it to disk."""

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.checkpoint.files.copy_checkpoint import copy_files
from paceline.checkpoint.files.two_phase_commit import commit_checkpoint, create_staging_folder, discard_staging_folder
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError
from paceline.events import Event, Note
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.filesystem.run_lock import FolderIdentity
from paceline.trainer.saving.background_thread import BackgroundThread
from paceline.trainer.saving.memory.memory_folder import MemoryFolder
from paceline.trainer.saving.memory.rank_memory import MemoryCheckpoint

_POLL_SECONDS = 1.0


class BackgroundSaves:
    """The saves in the background of one run. At most one is being written to disk.

    `is_on` says whether saves may be written in the background, and `is_writing` whether one was started for which
    `complete` has not waited. Both are equal on all ranks.
    """

    def __init__(
        self, *, world: World, folder: Path, folder_identity: FolderIdentity, memory: MemoryFolder | None, is_on: bool
    ) -> None:
        self.is_on = is_on
        self.is_writing = False
        self._world = world
        self._folder = folder
        self._folder_identity = folder_identity
        self._memory = memory
        self._thread = BackgroundThread("paceline-save")
        self._events: deque[Event] = deque()
        self._is_copy_started = False

    def write_to_memory(
        self, write: Callable[[MemoryFolder], MemoryCheckpoint]
    ) -> tuple[MemoryCheckpoint | None, list[Event]]:
        """Let all ranks write a checkpoint into memory with `write(memory)`, and return it.

        If that is not possible, return None, and a note that from now on each save waits for the disk.
        """
        if self._memory is None:
            problem = "the ranks run on several nodes, another launcher started them, or there is no /dev/shm."
        else:
            try:
                return write(self._memory), []
            except CheckpointError as error:
                problem = error.what
        self.is_on = False
        text = f"checkpoint.background is off: {problem} Each save waits until it is on disk"
        return None, [Note(text=text, level="warning")]

    def start_copy(self, source: MemoryCheckpoint, *, step: int, finish_save: Callable[[Path], Event]) -> None:
        """Start to copy a checkpoint from memory to disk. Every rank must call this, and rank 0 copies.

        When the checkpoint is committed, the thread calls `finish_save(path)`.

        Raises:
            SaveError: the disk has not enough free space, or the run folder was moved or removed.
        """
        run_on_all_ranks(self._world, partial(self._start_copy, source, step=step, finish_save=finish_save))
        self.is_writing = True

    def add(self, function: Callable[[], None]) -> None:
        """Let rank 0 call a function after the save that is being written."""
        if self._world.is_main and self._memory is not None:
            self._memory.add(lambda: self._thread.add(function))

    def complete(self) -> None:
        """Wait until the last save is on disk. Every rank must call this; a failure is raised on all.

        Raises:
            CheckpointError: the checkpoint could not be written; older checkpoints are untouched.
        """
        if not self.is_writing or self._memory is None:
            return
        self.is_writing = False
        problem: CheckpointError | None = None
        try:
            self._memory.complete()
        except CheckpointError as error:
            problem = error
        self._wait_until_copied()  # also after an error, because the copy still reads the memory
        try:
            run_on_all_ranks(self._world, self._wait_for_copy)
        finally:
            self._memory.take_back()
        if problem is not None:
            raise problem

    def _wait_until_copied(self) -> None:
        """Wait for the thread of rank 0, in short collectives: a slow disk must not look like a rank that hangs."""
        while not self._world.share_json(self._thread.is_idle(seconds=_POLL_SECONDS) if self._world.is_main else None):
            pass

    def take_events(self) -> list[Event]:
        """Return the events of saves that have been committed on disk since the last call. Only rank 0 has any."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        if events and self._memory is not None:
            self._memory.take_back()
        return events

    def close(self) -> None:
        """Wait until nothing is written any more. A failure is not raised, because the run has ended in another way."""
        if self._memory is not None:
            self._memory.close()
        self._thread.close()

    def _start_copy(self, source: MemoryCheckpoint, *, step: int, finish_save: Callable[[Path], Event]) -> None:
        if not self._world.is_main or self._memory is None:
            return
        self._folder_identity.check()
        staging = create_staging_folder(self._folder, step=step, num_bytes=source.num_bytes)
        copy = partial(self._copy, source.path, staging, step=step, finish_save=finish_save)
        self._is_copy_started = False
        self._memory.add(partial(self._begin_copy, source.path, copy))

    def _begin_copy(self, source: Path, copy: Callable[[], None]) -> None:
        """Start the copy of a checkpoint that has just been committed in memory."""
        assert self._memory is not None
        self._memory.lend(source)
        self._thread.add(copy)
        self._is_copy_started = True

    def _wait_for_copy(self) -> None:
        self._thread.wait()
        if self._world.is_main and not self._is_copy_started:
            raise SaveError(
                "a checkpoint could not be copied to disk, because writing it into memory failed.",
                where=str(self._folder),
                hint="--checkpoint.background false; older checkpoints are unchanged",
            )

    def _copy(self, source: Path, staging: Path, *, step: int, finish_save: Callable[[Path], Event]) -> None:
        """Copy a checkpoint to disk and commit it. Only the thread calls this."""
        try:
            with convert_to_save_error(f"step {step}", self._folder):
                copy_files(source, staging)
                path = commit_checkpoint(self._folder, staging, step=step)
        except BaseException:
            discard_staging_folder(staging)
            raise
        self._events.append(finish_save(path))
