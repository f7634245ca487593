"""Checkpoint folders: everything has a digest, and is written aside, flushed, renamed, then named in `latest`.

A folder `step-00000100` exists only once it is whole. Its manifest names every file and tensor with a digest, and
carries its own, so that no flipped bit loads silently.
"""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.manifest import read_body, stored_files
from paceline.checkpoint.files.manifest_schema import ManifestForm
from paceline.checkpoint.files.resharding_reader import StoredTensors, check_pieces
from paceline.checkpoint.files.safetensors_io import digest
from paceline.errors import CheckpointError
from paceline.filesystem.atomic_files import read_regular, write_text

LATEST, BEST = "latest", "best"
ASIDE = ".saving-"
_STEP = re.compile(r"step-([0-9]{8,18})")
_MOST_MARK_BYTES = 1 << 12


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """An opened checkpoint: the run's state, and the tensors by kind, which are read on demand."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, StoredTensors]

    def is_in(self, folder: Path) -> bool:
        """Return whether this is one of a run's own checkpoints, and not one that a branch starts from."""
        return self.path.resolve().parent == folder.resolve()


@dataclass(frozen=True, kw_only=True)
class UnusableCheckpoint:
    """A checkpoint that can't be used, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"refused {self.path}: {self.reason}"

    @property
    def is_unfinished(self) -> bool:
        """True for what an interrupted save left: it was no checkpoint yet."""
        return self.path.name.startswith(ASIDE)


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}"


def load(path: Path) -> OpenCheckpoint:
    """Open a checkpoint. Its tensors are read, and compared with their digests, on demand.

    Raises:
        CheckpointError: the manifest or a file is missing, cut off, changed or foreign.
    """
    body = read_manifest(path)
    files = stored_files(path, body.files)
    if not files:
        raise CheckpointError(f"{path.name} lists no file, so it holds no weights.", where=str(path))
    for name, first in body.state.get("aliases", {}).items():
        if not any(first in stored for stored in files.values()):
            raise CheckpointError(f"{name} is another name of {first}, which {path.name} lacks.", where=str(path))
    return OpenCheckpoint(path=path, step=body.step, state=body.state, files=files)


def verify(path: Path) -> None:
    """Read every byte once and compare it with its digest, keeping nothing in memory.

    Raises:
        CheckpointError: anything is missing, cut off, changed or foreign.
    """
    check_pieces(piece for stored in load(path).files.values() for piece in stored.every_piece())


def read_manifest(path: Path) -> ManifestForm:
    """Return the manifest's body after checking its digest, and its step against the folder's name.

    Raises:
        CheckpointError: it is missing, damaged, or of another format or step.
    """
    body = read_body(path)
    if step_of(path) not in (body.step, -1):
        raise CheckpointError(
            f"{path.name} holds step {body.step}, which differs from the folder's name.",
            where=str(path),
            cause="it was renamed, or copied to another name",
            hint=f"mv {path.name} {step_name(body.step)}",
        )
    return body


def newest_good(folder: Path) -> tuple[Path | None, list[UnusableCheckpoint]]:
    """Return the newest checkpoint that is whole, and the newer ones that are not."""
    _put_back(folder)
    refused = [
        UnusableCheckpoint(path=path, reason="the save was interrupted")
        for path in sorted(folder.glob(f"{ASIDE}step-*"))
        if not _is_saving(path)
    ]
    for path in reversed(all_steps(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            refused.append(UnusableCheckpoint(path=path, reason=error.what))
        else:
            return path, refused
    gone = folder / _said(folder, LATEST)
    if not refused and gone != folder and not gone.exists():
        refused.append(UnusableCheckpoint(path=gone, reason="`latest` names it, but it no longer exists"))
    return None, refused


def none_usable(folder: Path, refused: Sequence[UnusableCheckpoint], *, instead: str = "") -> CheckpointError:
    """Return the error for a run without a good checkpoint. What an interrupted save left does not count as one.

    `folder` is that of the run's checkpoints. `instead` is what else the user can do.
    """
    hint = f"paceline ckpt ls {folder.parent}" + (f", or {instead}" if instead else "")
    damaged = [one.reason for one in refused if not one.is_unfinished]
    what = f"none of the {len(damaged)} checkpoints can be used; the newest: {damaged[0]}" if damaged else ""
    return CheckpointError(what or "the run has no checkpoint.", where=str(folder), hint=hint)


def was_saved(folder: Path) -> bool:
    """Return whether a run has saved here, or was about to."""
    return (folder / LATEST).exists() or any(folder.glob("step-*")) or any(folder.glob(f"{ASIDE}*"))


def _put_back(folder: Path) -> None:
    """Restore an older save that a kill left aside between the two renames of a step that was saved twice."""
    for path in folder.glob(f"{ASIDE}old-step-*"):
        final = folder / path.name.removeprefix(f"{ASIDE}old-").rpartition("-")[0]
        if not final.exists() and not _is_saving(path):
            with suppress(OSError):
                path.rename(final)


def all_steps(folder: Path) -> list[Path]:
    """Return every checkpoint folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name; -1 if it names none."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def mark_best(folder: Path, path: Path) -> None:
    """Record the best checkpoint by its name and the name's digest, so that one can repair damage to the other."""
    write_text(folder / BEST, f"{path.name}\n{digest(path.name.encode())}\n")


def pointed_checkpoint(folder: Path, mark: str) -> Path | None:
    """Return the checkpoint that `latest` or `best` points to, or None if it is not here."""
    name = _said(folder, mark)
    path = folder / name
    return path if name and path.is_dir() else None


def is_mark_lost(folder: Path, mark: str) -> bool:
    """Return whether a mark exists that names no step, or a step that is not here."""
    return os.path.lexists(folder / mark) and pointed_checkpoint(folder, mark) is None


def _said(folder: Path, mark: str) -> str:
    """Return the step name in a mark, or an empty string; a digest of an existing step's name takes precedence."""
    try:
        data = read_regular(folder / mark, most_bytes=_MOST_MARK_BYTES)
    except (OSError, ValueError):
        return ""
    sealed = (path.name for path in all_steps(folder) if digest(path.name.encode()).encode() in data)
    name = data.partition(b"\n")[0].decode(errors="replace").strip()
    return next(sealed, name if _STEP.fullmatch(name) else "")


def prune(folder: Path, *, keep: int) -> list[Path]:
    """Remove all but the last `keep` and the best, and never the only good one; return the removed paths.

    If the mark of the best can't be read, nothing is removed: each of them may be it. A step that is a link is kept.
    """
    steps = all_steps(folder)
    kept = set(steps[-max(keep, 1) :]) | {pointed_checkpoint(folder, BEST), pointed_checkpoint(folder, LATEST)}
    doomed = [path for path in steps if path not in kept and not path.is_symlink()]
    if not doomed or is_mark_lost(folder, BEST):
        return []
    if not any(_is_good(path) for path in sorted((p for p in kept if p), reverse=True)):
        return []
    removed: list[Path] = []
    for path in doomed:
        gone = path.with_name(f"{ASIDE}gone-{path.name}")
        with suppress(FileNotFoundError):  # a run that trains meanwhile removes its oldest too
            path.rename(gone)
            removed.append(path)
        shutil.rmtree(gone, ignore_errors=True)
    return removed


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of interrupted saves whose processes have ended."""
    _put_back(folder)
    for path in folder.glob(f"{ASIDE}*"):
        if not _is_saving(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_saving(path: Path) -> bool:
    owner = path.name.rpartition("-")[2]
    return owner.isdecimal() and int(owner) != os.getpid() and Path(f"/proc/{owner}").exists()


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True
