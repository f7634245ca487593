"""Superseded checkpoints: if a run resumes from an older checkpoint, newer ones are moved to a separate folder."""

from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import BEST, LATEST, list_checkpoints, parse_step, resolve_mark
from paceline.filesystem.atomic_files import sync_folder, write_text


def move_superseded(folder: Path, *, start: Path) -> Path | None:
    """Move the checkpoints after `start` into a separate folder; return the folder, or None if nothing was moved.

    The newest checkpoint is moved first, so that a kill leaves a valid run. If the file `best` names a moved
    checkpoint, this file is moved too, because the best of the remaining checkpoints is not known.
    """
    later = [path for path in list_checkpoints(folder) if parse_step(path) > parse_step(start)]
    if not later:
        return None
    best = resolve_mark(folder, BEST)
    branch_folder = _unused_path(folder / f"after-{start.name}")
    branch_folder.mkdir()
    for path in reversed(later):
        path.rename(branch_folder / path.name)
    if best in later:
        (folder / BEST).rename(branch_folder / BEST)
    sync_folder(branch_folder)
    sync_folder(folder)
    write_text(folder / LATEST, start.name + "\n")
    return branch_folder


def _unused_path(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
