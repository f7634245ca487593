"""Saves in the background: the training waits for a checkpoint in memory, and a thread of rank 0 copies it to disk."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.checkpoint.files.copy_checkpoint import copy_files
from paceline.checkpoint.files.two_phase_commit import commit_checkpoint, create_staging_folder, discard_staging_folder
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.errors import CheckpointError
from paceline.events import Event, Note
from paceline.filesystem.atomic_files import folder_bytes
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.filesystem.run_lock import FolderIdentity
from paceline.trainer.saving.memory_folder import MemoryFolder


class BackgroundThread:
    """A thread that calls functions in the order in which they were added.

    The training continues as long as these functions are in calls that release Python's lock, such as the copy of a
    file. An error of one function cancels the functions after it, and is raised by the next `wait`.
    """

    def __init__(self) -> None:
        self._functions: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, after those that were added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-save", daemon=True)
            self._thread.start()
        self._functions.put(function)

    def wait(self) -> None:
        """Wait until the thread has nothing left to do.

        Raises:
            BaseException: the error of the first function that failed since the last call.
        """
        self._functions.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the functions that were added, and end the thread. Errors are dropped."""
        if self._thread is not None:
            self._functions.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (function := self._functions.get()) is not None:
            try:
                if self._error is None:
                    function()
            except BaseException as error:
                self._error = error
            finally:
                self._functions.task_done()
        self._functions.task_done()


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
        self._thread = BackgroundThread()
        self._events: deque[Event] = deque()

    def write_to_memory(self, write: Callable[[Path], Path]) -> tuple[Path | None, list[Event]]:
        """Let all ranks write a checkpoint into memory with `write(folder)`, and return its path.

        If that is not possible, return None, and a note that from now on each save waits for the disk.
        """
        if self._memory is None:
            problem = "another launcher than Paceline's started the ranks, or there is no /dev/shm."
        else:
            try:
                return self._memory.write(write), []
            except CheckpointError as error:
                problem = error.what
        self.is_on = False
        text = f"checkpoint.background is off: {problem} Each save waits until it is on disk"
        return None, [Note(text=text, level="warning")]

    def start_copy(self, source: Path, *, step: int, finish_save: Callable[[Path], Event]) -> None:
        """Start to copy a checkpoint from memory to disk. Every rank must call this, and rank 0 copies.

        When the checkpoint is committed, the thread calls `finish_save(path)`.

        Raises:
            SaveError: the disk has not enough free space, or the run folder was moved or removed.
        """
        run_on_all_ranks(self._world, partial(self._start_copy, source, step=step, finish_save=finish_save))
        self.is_writing = True

    def add(self, function: Callable[[], None]) -> None:
        """Let rank 0 call a function after the save that is being written."""
        if self._world.is_main:
            self._thread.add(function)

    def complete(self) -> None:
        """Wait until the last save is on disk. Every rank must call this; a failure is raised on all.

        Raises:
            CheckpointError: the checkpoint could not be written; older checkpoints are untouched.
        """
        if not self.is_writing:
            return
        self.is_writing = False
        try:
            run_on_all_ranks(self._world, self._thread.wait)  # only the thread of rank 0 has work
        finally:
            if self._memory is not None:
                self._memory.take_back()

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
        self._thread.close()

    def _start_copy(self, source: Path, *, step: int, finish_save: Callable[[Path], Event]) -> None:
        if not self._world.is_main or self._memory is None:
            return
        self._folder_identity.check()
        staging = create_staging_folder(self._folder, step=step, num_bytes=folder_bytes(source))
        self._memory.lend(source)
        self._thread.add(partial(self._copy, source, staging, step=step, finish_save=finish_save))

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
