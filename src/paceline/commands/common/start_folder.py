"""The run folder of a command that starts processes: which one it is, and whether it can be written."""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

from paceline.config.task import Task
from paceline.errors import UsageError
from paceline.launch.launcher_variables import detect_world
from paceline.launch.requeued_run import current_scheduler_jobs, find_or_create_run
from paceline.run_folder.run_folder import choose_run, number_run


def assign_run_folder(task: Task, *, resume: str | None) -> Task:
    """Return the task with its run folder: a new one, the newest, or the named one.

    Under another launcher, only rank 0 chooses; the other ranks get the task unchanged.
    """
    joined = detect_world(os.environ)
    if joined is not None and joined.rank != 0:
        return task
    name = task.short_job
    run, resume_from = choose_run(name, run=task.run, resume=resume)
    if run is None:
        jobs = current_scheduler_jobs(os.environ) if task.verb == "train" else ()
        run_path = find_or_create_run(name, jobs, request=task.request).path
        return replace(task, run=str(run_path), resume=resume_from)
    create_run_folder(run.path)
    return replace(task, run=str(run.path), resume=resume_from)


def create_run_folder(path: Path) -> None:
    """Create the named run folder, if it does not exist.

    Raises:
        UsageError: the folder can't be written, or is a folder that `refuse_shared_folder` refuses.
    """
    refuse_shared_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        number_run(path)
        with TemporaryFile(dir=path):  # an existing folder may belong to another user or be on a read-only disk
            pass
    except OSError as error:
        raise unwritable_folder_error(path, error) from None


def refuse_shared_folder(path: Path) -> None:
    """Refuse the home folder, or a folder above it or above the working directory, as a run folder."""
    resolved, home_folders = path.resolve(), _home_folders()
    if resolved in (
        *Path.cwd().parents,
        *home_folders,
        *(parent for folder in home_folders for parent in folder.parents),
    ):
        raise UsageError(
            f"--run-dir {path} is {resolved}: the run's files would mix with everything else there.",
            hint="--run-dir runs/NAME",
        )


def unwritable_folder_error(path: Path, error: OSError) -> UsageError:
    """Return the error for a run folder that can't be created or written."""
    return UsageError(f"the run folder {path} can't be written: {error.strerror}.", hint="--run-dir on a writable disk")


def _home_folders() -> list[Path]:
    """Return the user's home folder; a bare user id in a container may have none."""
    try:
        return [Path.home().resolve()]
    except RuntimeError:
        return []
