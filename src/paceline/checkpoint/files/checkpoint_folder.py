"""Checkpoint folders: list, open, check, mark and remove them.

A checkpoint is written to a staging folder, which is renamed to `step-00000100` when it is complete. Its manifest has
the size of every file and the digest of its header, the digest of every tensor, and a digest of itself. So a flipped
bit is detected.
"""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from paceline.checkpoint.files.manifest import open_stored_files, read_body
from paceline.checkpoint.files.manifest_schema import ManifestSchema
from paceline.checkpoint.files.resharding_reader import StoredTensors, check_digests
from paceline.checkpoint.files.safetensors_io import sha256_digest
from paceline.errors import CheckpointError
from paceline.filesystem.atomic_files import read_regular, write_text

LATEST, BEST = "latest", "best"  # marks: files that contain the name of a checkpoint folder
STAGING_PREFIX = ".saving-"
_STEP = re.compile(r"step-([0-9]{8,18})")
_MAX_MARK_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """An opened checkpoint: the run's state, and the tensors by kind, which are read on demand."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, StoredTensors]

    def belongs_to(self, folder: Path) -> bool:
        """Return whether this checkpoint is in `folder`. A branch starts from a checkpoint in another run's folder."""
        return self.path.resolve().parent == folder.resolve()


@dataclass(frozen=True, kw_only=True)
class UnusableCheckpoint:
    """A checkpoint that can't be used, and why."""

    path: Path
    reason: str

    @override
    def __str__(self) -> str:
        return f"refused {self.path}: {self.reason}"

    @property
    def is_unfinished(self) -> bool:
        """True for the staging folder of an interrupted save, which is not a checkpoint yet."""
        return self.path.name.startswith(STAGING_PREFIX)


def step_name(step: int) -> str:
    """Return the name of the checkpoint folder of a step."""
    return f"step-{step:08d}"


def open_checkpoint(path: Path, *, obtain: Callable[[str], None] | None = None) -> OpenCheckpoint:
    """Open a checkpoint. Its tensors are read, and compared with their digests, on demand.

    With `obtain`, files may be missing: `obtain(name)` is called before a file is first read.

    Raises:
        CheckpointError: the manifest or a file is missing, truncated, changed or from another checkpoint.
    """
    body = read_manifest(path)
    files = open_stored_files(path, body.files, obtain=obtain)
    if not files:
        raise CheckpointError(f"{path.name} lists no file, so it holds no weights.", where=str(path))
    for name, first in body.state.get("aliases", {}).items():
        if not any(first in stored for stored in files.values()):
            raise CheckpointError(f"{name} is another name of {first}, which {path.name} lacks.", where=str(path))
    return OpenCheckpoint(path=path, step=body.step, state=body.state, files=files)


def check_checkpoint(path: Path) -> None:
    """Read every tensor of a checkpoint, a block at a time, and compare it with its digest.

    Raises:
        CheckpointError: anything is missing, truncated, changed or from another checkpoint.
    """
    check_digests(shard for stored in open_checkpoint(path).files.values() for shard in stored.all_shards())


def read_manifest(path: Path) -> ManifestSchema:
    """Return the manifest's body, after checking its digest and that the folder's name has the same step.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another format or step.
    """
    body = read_body(path)
    if parse_step(path) not in (body.step, -1):
        raise CheckpointError(
            f"{path.name} holds step {body.step}, which differs from the folder's name.",
            where=str(path),
            cause="the folder was renamed, or copied to another name",
            hint=f"mv {path.name} {step_name(body.step)}",
        )
    return body


def find_newest_usable(folder: Path) -> tuple[Path | None, list[UnusableCheckpoint]]:
    """Return the newest intact checkpoint, or None, and a list of checkpoints that can't be used.

    The list has the newer checkpoints that are damaged, the staging folders of interrupted saves, and the checkpoint
    that `latest` names if it is missing.
    """
    _restore_replaced(folder)
    refused = [
        UnusableCheckpoint(path=path, reason="the save was interrupted")
        for path in sorted(folder.glob(f"{STAGING_PREFIX}step-*"))
        if not _is_being_written(path)
    ]
    missing = folder / _read_mark(folder, LATEST)
    if missing != folder and not missing.exists():
        refused.append(UnusableCheckpoint(path=missing, reason="`latest` names it, but it no longer exists"))
    for path in reversed(list_checkpoints(folder)):
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            refused.append(UnusableCheckpoint(path=path, reason=error.what))
        else:
            return path, refused
    return None, refused


def no_usable_checkpoint(
    folder: Path, refused: Sequence[UnusableCheckpoint], *, alternative: str = ""
) -> CheckpointError:
    """Return the error for a run without a usable checkpoint.

    `folder` contains the run's checkpoints. `refused` is from `find_newest_usable`; the message leaves out its staging
    folders. `alternative` is added to the hint.
    """
    hint = f"paceline ckpt ls {folder.parent}" + (f", or {alternative}" if alternative else "")
    damaged = [checkpoint.reason for checkpoint in refused if not checkpoint.is_unfinished]
    message = f"none of the {len(damaged)} checkpoints can be used; the newest: {damaged[0]}" if damaged else ""
    return CheckpointError(message or "the run has no checkpoint.", where=str(folder), hint=hint)


def has_saves(folder: Path) -> bool:
    """Return whether a run has saved a checkpoint in `folder`, or has begun to save one."""
    return (folder / LATEST).exists() or any(folder.glob("step-*")) or any(folder.glob(f"{STAGING_PREFIX}*"))


def _restore_replaced(folder: Path) -> None:
    """Restore a checkpoint that was being replaced when its run was killed between the two renames of the commit."""
    for path in folder.glob(f"{STAGING_PREFIX}old-step-*"):
        final = folder / path.name.removeprefix(f"{STAGING_PREFIX}old-").rpartition("-")[0]
        if not final.exists() and not _is_being_written(path):
            with suppress(OSError):
                path.rename(final)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return every checkpoint folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=parse_step)


def parse_step(path: Path) -> int:
    """Return the step in a checkpoint folder's name; -1 if the name has none."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def mark_best(folder: Path, path: Path) -> None:
    """Write the name of the best checkpoint and the digest of this name. Either is enough to find the checkpoint."""
    write_text(folder / BEST, f"{path.name}\n{sha256_digest(path.name.encode())}\n")


def resolve_mark(folder: Path, mark: str) -> Path | None:
    """Return the checkpoint that `latest` or `best` names, or None if there is no such checkpoint."""
    name = _read_mark(folder, mark)
    path = folder / name
    return path if name and path.is_dir() else None


def newest_step(folder: Path) -> int:
    """Return the step of the checkpoint that `latest` names; -1 if there is none."""
    newest = resolve_mark(folder, LATEST)
    return -1 if newest is None else parse_step(newest)


def is_mark_broken(folder: Path, mark: str) -> bool:
    """Return whether a mark exists but names no existing checkpoint."""
    return os.path.lexists(folder / mark) and resolve_mark(folder, mark) is None


def _read_mark(folder: Path, mark: str) -> str:
    """Return the checkpoint name in a mark, or an empty string.

    The digest in the mark takes precedence over the name, if it is the digest of an existing checkpoint's name.
    """
    try:
        data = read_regular(folder / mark, max_bytes=_MAX_MARK_BYTES)
    except (OSError, ValueError):
        return ""
    digest_matches = (
        path.name for path in list_checkpoints(folder) if sha256_digest(path.name.encode()).encode() in data
    )
    name = data.partition(b"\n")[0].decode(errors="replace").strip()
    return next(digest_matches, name if _STEP.fullmatch(name) else "")


def prune_checkpoints(folder: Path, *, keep: int, path_in_use: Path | None = None) -> list[Path]:
    """Remove all checkpoints except the newest `keep`, the latest, the best and `path_in_use`.

    Return the removed paths. Nothing is removed if none of the remaining checkpoints is intact, or if `best` can't be
    read: then any checkpoint may be the best. Symbolic links are not removed.
    """
    steps = list_checkpoints(folder)
    retained = set(steps[-max(keep, 1) :]) | {resolve_mark(folder, BEST), resolve_mark(folder, LATEST), path_in_use}
    expired = [path for path in steps if path not in retained and not path.is_symlink()]
    if not expired or is_mark_broken(folder, BEST):
        return []
    if not any(_is_valid(path) for path in sorted((p for p in retained if p), reverse=True)):
        return []
    removed: list[Path] = []
    for path in expired:
        trash = path.with_name(f"{STAGING_PREFIX}gone-{path.name}")
        with suppress(FileNotFoundError):  # a run that trains at the same time may have removed it
            path.rename(trash)
            removed.append(path)
        shutil.rmtree(trash, ignore_errors=True)
    return removed


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of interrupted saves whose processes have ended."""
    _restore_replaced(folder)
    for path in folder.glob(f"{STAGING_PREFIX}*"):
        if not _is_being_written(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_being_written(path: Path) -> bool:
    owner = path.name.rpartition("-")[2]
    return owner.isdecimal() and int(owner) != os.getpid() and Path(f"/proc/{owner}").exists()


def _is_valid(path: Path) -> bool:
    try:
        check_checkpoint(path)
    except CheckpointError:
        return False
    return True
