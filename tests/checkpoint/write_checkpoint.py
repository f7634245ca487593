"""A checkpoint written by one process, from the parts that ranks use together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.manifest import Files, write_files, write_manifest
from paceline.checkpoint.files.two_phase_commit import (
    commit_checkpoint,
    create_staging_folder,
    discard_staging_folder,
    total_bytes,
)
from paceline.filesystem.disk_full import convert_to_save_error


def save(folder: Path, *, step: int, files: Files, state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` into `folder` and make it the latest."""
    aside = create_staging_folder(folder, step=step, num_bytes=total_bytes(files))
    with convert_to_save_error(f"step {step}", folder):
        try:
            write_part(aside, files=files, state=state, step=step)
            return commit_checkpoint(folder, aside, step=step)
        except BaseException:
            discard_staging_folder(aside)
            raise


def write_part(aside: Path, *, files: Files, state: Mapping[str, Any], step: int) -> None:
    """Write tensors and manifest into a folder that nobody reads yet, and flush them."""
    write_manifest(aside, file_entries=write_files(aside, files), state=state, step=step)
