"""Superseded checkpoints: those after the one that a run resumes from are moved to a separate folder."""

from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import BEST, LATEST, list_checkpoints, parse_step, resolve_mark
from paceline.filesystem.atomic_files import sync_folder, write_text


def move_superseded(folder: Path, *, start: Path) -> Path | None:
    """Move the checkpoints after `start` into a separate folder; return it, or None if there are none.

    They are moved newest first, so that a kill leaves a valid run. `best` moves with them if it names one of them,
    because the best of the remaining ones is not known.
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
