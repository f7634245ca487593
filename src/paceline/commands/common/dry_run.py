"""The checks that `--dry-run` adds to those of `make_task`: the run folder, the run to resume, and the sinks."""

import os
from pathlib import Path
from tempfile import TemporaryFile

from paceline.commands.common.execution import collect_problems
from paceline.commands.common.layout_problems import fewer_rank_counts
from paceline.commands.common.start_folder import refuse_shared_folder, unwritable_folder_error
from paceline.config.job_reference import parse_jobref
from paceline.config.merge_settings import as_command_text, merge_without_job
from paceline.config.parse_auto_layout import is_auto
from paceline.config.secret_settings import mask_value
from paceline.config.settings import Settings
from paceline.config.task import Task
from paceline.console.formatting import plural
from paceline.errors import PacelineError, raise_all
from paceline.launch.launcher_variables import detect_world
from paceline.reporting.sinks.sink_registry import missing_sink_errors
from paceline.run_folder.run_folder import ROOT, choose_run


def check_start(task: Task, *, resume: str | None = None) -> str:
    """Run the checks that a start makes before it imports the job; return a sentence about what would start.

    Nothing is created. Under another launcher only rank 0 checks the folder.

    Raises:
        PacelineError, Problems: the start would be refused.
    """
    problems: list[PacelineError] = []
    joined = detect_world(os.environ)
    chooses_folder = joined is None or joined.rank == 0
    folder_text = collect_problems(problems, lambda: _check_run(task, resume=resume)) if chooses_folder else ""
    if task.verb == "train":
        collect_problems(problems, lambda: _check_sinks(task))
    if joined is None and not is_auto(task.layout):
        collect_problems(problems, lambda: fewer_rank_counts(task, _settings(task)))
    raise_all(problems)
    start_text = "plan" if task.verb == "plan" else f"{task.layout} on {plural(task.ranks, 'rank')}"
    return f"would be accepted: {start_text}{folder_text}"


def _check_run(task: Task, *, resume: str | None) -> str:
    run, start = choose_run(task.short_job, run=task.run, resume=resume)
    check_folder(run.path if run is not None else ROOT / task.short_job)
    if run is None:
        return f", a new run folder in {ROOT / task.short_job}"
    resume_text = "" if start is None else f", resumed from {'its newest checkpoint' if start == 'newest' else start}"
    return f", run folder {run.path}{resume_text}"


def start_lines(task: Task) -> list[str]:
    """Return what a command asks for, in the words of its options, one line each; secrets are masked."""
    values = {
        "job": task.job,
        "nodes": task.nodes,
        "ranks": task.ranks,
        "device": task.device,
        "layout": task.layout,
        "update": "" if task.update == "sync" else task.typed_update or task.update,
        "compress": "" if task.compress == "none" else task.compress,
        "faults": task.faults,
        **{name: mask_value(name, as_command_text(value)) for name, value in task.settings.items()},
    }
    return [f"{name}: {value}" for name, value in values.items() if value != ""]


def check_folder(path: Path) -> None:
    """Check that a run folder can be written, or created; create nothing.

    Raises:
        UsageError: the folder can't be written, or is a folder that `refuse_shared_folder` refuses.
    """
    refuse_shared_folder(path)
    try:
        existing_folder = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        with TemporaryFile(dir=existing_folder):
            pass
    except OSError as error:
        raise unwritable_folder_error(path, error) from None


def _settings(task: Task) -> Settings:
    return merge_without_job(task.settings)


def _check_sinks(task: Task) -> None:
    settings = _settings(task)
    file = None if task.job_handle is not None else parse_jobref(task.job).path
    raise_all(
        missing_sink_errors(settings.watch.to, folders=(Path.cwd(), *([file.parent] if file is not None else [])))
    )
