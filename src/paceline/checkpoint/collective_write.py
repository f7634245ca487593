"""Collective checkpoint writes: one rank begins, each rank writes, one commits; if one fails, none commits."""

import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.manifest import Files, write_files, write_manifest
from paceline.checkpoint.files.two_phase_commit import begin, bytes_of, commit, discard
from paceline.comm.collective_errors import first_value_per_key, on_all_ranks
from paceline.comm.process_group import World
from paceline.errors import SaveError
from paceline.filesystem.disk_full import as_checkpoint_error
from paceline.filesystem.run_lock import FolderIdentity


def write_checkpoint(
    world: World,
    *,
    folder: Path,
    step: int,
    files: Files,
    state: Mapping[str, Any],
    place: FolderIdentity | None = None,
) -> Path:
    """Write the checkpoint of `step` and make it the latest; `files` are this rank's, `state` is the first rank's.

    Nothing is written if `place` shows that the run's folder no longer exists. Until the last phase nobody reads what
    was written, and the older checkpoint is the newest good one.

    Raises:
        SaveError: on some rank no space, no permission, or another disk.
        CheckpointError: an element of a tensor would be in no file, or in two.
    """
    needed = sum(world.gather_json(bytes_of(files)))
    start = partial(_begin, folder, step=step, num_bytes=needed, place=place)
    begun = on_all_ranks(world, lambda: start() if world.is_main else None)
    aside = Path(world.share_json(str(begun)))
    try:
        listed = on_all_ranks(world, partial(_write_own, aside, files, world))
        told = first_value_per_key(world.gather_json(listed))
        done = partial(_finish, folder, aside, listed=told, state=state, step=step)
        path = on_all_ranks(world, lambda: done() if world.is_main else None)
    except BaseException:
        if world.is_main:
            discard(aside)
        raise
    return Path(world.share_json(str(path)))


def _begin(folder: Path, *, step: int, num_bytes: int, place: FolderIdentity | None) -> Path:
    if place is not None:
        place.check()
    return begin(folder, step=step, num_bytes=num_bytes)


def _write_own(aside: Path, files: Files, world: World) -> dict[str, Any]:
    if files and not aside.is_dir():
        raise SaveError(
            f"rank {world.rank} on {socket.gethostname()} can't see the folder that the checkpoint is written to.",
            where=str(aside),
            cause="ranks on several machines hold parts of the model, and the run folder is on one machine's own disk",
            hint="--run-dir on a disk that all machines share",
        )
    with as_checkpoint_error(f"what rank {world.rank} holds", aside.parent):
        return write_files(aside, files)


def _finish(folder: Path, aside: Path, *, listed: Mapping[str, Any], state: Mapping[str, Any], step: int) -> Path:
    with as_checkpoint_error(f"step {step}", folder):
        write_manifest(aside, listed=listed, state=state, step=step)
        return commit(folder, aside, step=step)
