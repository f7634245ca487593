"""Checks, at the start of a run, that its checkpoints will fit on the disk and into memory."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import list_checkpoints
from paceline.console.formatting import format_size, plural
from paceline.errors import SaveError
from paceline.filesystem.atomic_files import folder_bytes, free_bytes
from paceline.filesystem.disk_full import convert_to_save_error, require_free_space
from paceline.launch.failures.oom_detection import tightest_shared_limit


def warn_of_full_disk(folder: Path, num_bytes: int, *, num_kept: int) -> str:
    """Return a warning if the disk has no room for all checkpoints of a run, of `num_bytes` bytes each; else "".

    The run keeps `num_kept` of them, and writes one more before it removes the oldest.
    """
    with suppress(OSError):
        num_missing = max(0, num_kept + 1 - len(list_checkpoints(folder)))
        try:
            require_free_space(folder, num_bytes * num_missing)
        except SaveError:
            kept, size = plural(num_kept, "checkpoint"), format_size(num_bytes)
            return (
                f"the disk of {folder} may become full: the run keeps up to {kept} and writes one more, of {size} "
                f"each, and {format_size(free_bytes(folder))} are free. To keep fewer: --checkpoint.keep"
            )
    return ""


def require_free_memory(folder: Path, sizes: Sequence[int], *, num_copies: int) -> None:
    """Check that there is memory for `num_copies` checkpoints in `folder`, which lies on a disk in memory.

    `sizes` are the bytes that the ranks write of each. Checkpoints that are there already will be replaced.

    Raises:
        SaveError: there is not enough. The kernel might otherwise kill a process of the training.
    """
    with convert_to_save_error("a checkpoint in memory", folder):
        needed = sum(sizes) * num_copies - sum(map(folder_bytes, list_checkpoints(folder)))
        free, name = free_bytes(folder), f"the disk {folder.parent}"
    limit = tightest_shared_limit()
    if limit is not None and limit.limit_bytes - limit.used_bytes < free:
        free, name = limit.limit_bytes - limit.used_bytes, limit.name
    if free < needed:
        raise SaveError(
            f"checkpoints in memory need {format_size(needed)}, but only {format_size(max(0, free))} are free in "
            f"{name}.",
            where=str(folder),
            hint="--checkpoint.memory_every 0 --checkpoint.background false",
        )
