"""Checks, at the start of a run, that its checkpoints will fit on the disk and into memory."""

from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import list_checkpoints
from paceline.checkpoint.files.two_phase_commit import total_bytes
from paceline.checkpoint.train_state import TrainState, collect_files
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.console.formatting import format_size, plural
from paceline.errors import SaveError
from paceline.filesystem.atomic_files import free_bytes
from paceline.filesystem.disk_full import require_free_space
from paceline.launch.failures.oom_detection import tightest_memory_limit


def check_disk_space(state: TrainState, *, folder: Path, num_kept: int, has_saved: bool, world: World) -> str:
    """Check that the disk has room for a checkpoint, once the optimizers have their state. Every rank must call this.

    Return a warning if the disk has no room for all checkpoints of which the run keeps `num_kept`, else an empty text.

    Raises:
        SaveError: there is no room for a single one, and the run has not saved yet.
    """
    files, _ = collect_files(state)
    num_bytes = sum(state.world.gather_json(total_bytes(files)))
    is_required = world.is_main and not has_saved
    run_on_all_ranks(world, lambda: require_free_space(folder, num_bytes) if is_required else None)
    if not world.is_main:
        return ""
    num_missing = num_kept + 1 - len(list_checkpoints(folder))  # one more is written before the oldest is removed
    try:
        require_free_space(folder, num_bytes * max(0, num_missing))
    except SaveError:
        kept = plural(num_kept, "checkpoint")
        return (
            f"the disk of {folder} will be full: the run keeps {kept} and writes one more, of "
            f"{format_size(num_bytes)} each, and {format_size(free_bytes(folder))} are free. To keep fewer: "
            "--checkpoint.keep"
        )
    return ""


def require_free_memory(folder: Path, num_bytes: int) -> None:
    """Check that the machine has `num_bytes` bytes for checkpoints in `folder`, a disk in memory.

    Raises:
        SaveError: it has not. The kernel might otherwise kill a process of the training.
    """
    free, name = free_bytes(folder), f"the disk of {folder}"
    limit = tightest_memory_limit()
    if limit is not None and limit.limit_bytes - limit.used_bytes < free:
        free, name = limit.limit_bytes - limit.used_bytes, limit.name
    if free < num_bytes:
        raise SaveError(
            f"checkpoints in memory need {format_size(num_bytes)}, but of {name} only {format_size(max(0, free))} are "
            "free.",
            where=str(folder),
            hint="--checkpoint.memory_every 0 turns them off",
        )
