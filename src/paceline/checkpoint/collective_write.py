"""Collective checkpoint writes: rank 0 begins, every rank writes, rank 0 commits; a failure on any rank aborts."""

import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.manifest import Files, write_files, write_manifest
from paceline.checkpoint.files.two_phase_commit import (
    commit_checkpoint,
    create_staging_folder,
    discard_staging_folder,
    total_bytes,
)
from paceline.comm.collective_errors import first_value_per_key, run_on_all_ranks
from paceline.comm.process_group import World
from paceline.errors import SaveError
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.filesystem.run_lock import FolderIdentity


def write_checkpoint(
    world: World,
    *,
    folder: Path,
    step: int,
    files: Files,
    state: Mapping[str, Any],
    folder_identity: FolderIdentity | None = None,
) -> Path:
    """Write the checkpoint of `step` into `folder`: each rank writes its `files`, and rank 0 writes its `state`.

    Nothing is written if `folder_identity` shows that the run's folder no longer exists. Until the commit, a reader
    finds only older checkpoints; after it, this checkpoint is the latest. Return its path.

    Raises:
        SaveError: a rank has no space or no permission, or does not see the folder.
        CheckpointError: an element of a tensor would be in no file, or in two.
    """
    num_bytes = sum(world.gather_json(total_bytes(files)))
    start_write = partial(_start_write, folder, step=step, num_bytes=num_bytes, folder_identity=folder_identity)
    created = run_on_all_ranks(world, lambda: start_write() if world.is_main else None)
    staging = Path(world.share_json(str(created)))
    try:
        local_entries = run_on_all_ranks(world, partial(_write_local_files, staging, files, world))
        entries = first_value_per_key(world.gather_json(local_entries))
        finish = partial(_finish_write, folder, staging, entries=entries, state=state, step=step)
        path = run_on_all_ranks(world, lambda: finish() if world.is_main else None)
    except BaseException:
        if world.is_main:
            discard_staging_folder(staging)
        raise
    return Path(world.share_json(str(path)))


def _start_write(folder: Path, *, step: int, num_bytes: int, folder_identity: FolderIdentity | None) -> Path:
    if folder_identity is not None:
        folder_identity.check()
    return create_staging_folder(folder, step=step, num_bytes=num_bytes)


def _write_local_files(staging: Path, files: Files, world: World) -> dict[str, Any]:
    if files and not staging.is_dir():
        raise SaveError(
            f"rank {world.rank} on {socket.gethostname()} can't see the folder that the checkpoint is written to.",
            where=str(staging),
            cause="ranks on several machines hold parts of the model, and the run folder is on one machine's own disk",
            hint="--run-dir on a disk that all machines share",
        )
    with convert_to_save_error(f"the shards of rank {world.rank}", staging.parent):
        return write_files(staging, files)


def _finish_write(
    folder: Path, staging: Path, *, entries: Mapping[str, Any], state: Mapping[str, Any], step: int
) -> Path:
    with convert_to_save_error(f"step {step}", folder):
        write_manifest(staging, file_entries=entries, state=state, step=step)
        return commit_checkpoint(folder, staging, step=step)
