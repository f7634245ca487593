"""The folder of a command's checkpoints in memory, which the memory tier and saves in the background share.

The training waits until all ranks have copied their tensors. Then a thread of each rank computes the digests of its
copy, and the thread of rank 0 commits the checkpoint once all ranks have theirs. A rank that dies in between leaves the
checkpoint uncommitted, and a restart uses the one before.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from paceline.checkpoint.files.checkpoint_folder import STAGING_PREFIX, list_checkpoints, step_name
from paceline.checkpoint.files.manifest import write_manifest
from paceline.checkpoint.files.memory_slots import WrittenFile, compute_digests
from paceline.checkpoint.files.two_phase_commit import commit_checkpoint, discard_staging_folder
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError
from paceline.filesystem.atomic_files import parse_json, write_text
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.launch.memory_disk import LOCKED_RUN, describe_lock
from paceline.trainer.saving.memory.rank_memory import WORK_FOLDER, RankMemory

_KEPT = 2  # the newest checkpoint, and an older one in case the newest is damaged
_POLL_SECONDS = 0.002


class MemoryFolder(RankMemory):
    """The folder in /dev/shm. All ranks write a checkpoint into it, and rank 0 commits it and removes older ones.

    With `keeps_checkpoints`, a restart on the same machine finds the newest checkpoints here. Otherwise a checkpoint is
    removed once it has been copied to disk. The folder names the `run`, so that a later command can remove it if this
    one is killed with all of its processes. The files that are only of use to the processes of an earlier attempt are
    removed.
    """

    def __init__(
        self, path: Path, *, world: World, keeps_checkpoints: bool, attempt: int = 1, run: Path | None = None
    ) -> None:
        super().__init__(path, world=world, attempt=attempt)
        self._run = run
        self._num_kept = _KEPT if keeps_checkpoints else 0
        self._lent: Path | None = None
        if world.is_main:
            self._remove_leftovers()

    @override
    def _staging_folder(self, step: int) -> Path:
        return self.path / f"{STAGING_PREFIX}{step_name(step)}-memory"

    @override
    def _checked_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        return sizes if self._world.is_main else ()

    @override
    def _num_copies(self) -> int:
        return max(1, self._num_kept) + 1

    @override
    def _complete(
        self, staging: Path, written: Mapping[str, WrittenFile], *, step: int, state: Mapping[str, Any]
    ) -> None:
        self._thread.add(partial(self._digest, written, step=step))
        if self._world.is_main:
            text = json.dumps(state)  # the objects may change while the thread works
            self._thread.add(partial(self._commit, staging, step=step, state=text))

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

    def lend(self, checkpoint: Path) -> None:
        """Keep a checkpoint until `take_back` is called. Only the thread calls this."""
        self._lent = checkpoint

    def take_back(self) -> None:
        """End the loan of `lend`."""
        self._thread.add(self._take_back)

    @override
    def _create(self) -> None:
        super()._create()
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
        for path in [*self.path.glob(f"{STAGING_PREFIX}*"), *self.path.glob(f"{WORK_FOLDER}-*")]:
            if path != self._work_folder:
                shutil.rmtree(path, ignore_errors=True)
