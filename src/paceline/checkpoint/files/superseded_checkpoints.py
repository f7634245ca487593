"""Abandoned branches: checkpoints after the one that a run resumes from are kept in a folder of their own."""

from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import BEST, LATEST, all_steps, pointed_checkpoint, step_of
from paceline.filesystem.atomic_files import sync_folder, write_text


def set_aside(folder: Path, *, start: Path) -> Path | None:
    """Move the checkpoints after `start` into a folder of their own; return it, or None if there are none.

    They are moved from the last to the first, so that a kill leaves an ordinary run. `best` goes with them if it is one
    of them: which of the others was best is not known.
    """
    later = [path for path in all_steps(folder) if step_of(path) > step_of(start)]
    if not later:
        return None
    best = pointed_checkpoint(folder, BEST)
    aside = _unused(folder / f"after-{start.name}")
    aside.mkdir()
    for path in reversed(later):
        path.rename(aside / path.name)
    if best in later:
        (folder / BEST).rename(aside / BEST)
    sync_folder(aside)
    sync_folder(folder)
    write_text(folder / LATEST, start.name + "\n")
    return aside


def _unused(path: Path) -> Path:
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
