"""The run folder: its files, and how a command finds the run or the checkpoint that the user names."""

import os
import re
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.checkpoint.files.checkpoint_folder import (
    find_newest_usable,
    has_saves,
    list_checkpoints,
    no_usable_checkpoint,
    parse_step,
)
from paceline.checkpoint.files.manifest import MANIFEST
from paceline.config.task import Task
from paceline.console.formatting import closest_word, first_names
from paceline.console.output import print_line
from paceline.errors import UsageError
from paceline.filesystem.atomic_files import read_json, read_regular

ROOT = Path("runs")
NUMBER = ".number"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and the paths in it."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of each attempt's logs."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """The events file, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """The numbers of each logged step, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def task(self) -> Path:
        """The task file, with the job and settings; it exists if the run has reached training."""
        return self.path / "task.json"

    @property
    def report(self) -> Path:
        """The report page."""
        return self.path / "report.html"

    def answer(self, verb: str) -> Path:
        """Return the file in which rank 0 writes the result of a command such as `verify`."""
        return self.path / f"answer-{verb}.json"

    def attempt_folder(self, number: int) -> Path:
        """Return the folder with the logs of one attempt."""
        return self.logs / f"attempt-{number}"

    def next_attempt(self) -> int:
        """Return the number of the next attempt."""
        numbers = [int(p.name[8:]) for p in self.logs.glob("attempt-*") if p.name[8:].isdecimal()]
        return max(numbers, default=0) + 1


def new_run(name: str, *, root: Path = ROOT, run_id: str | None = None) -> RunFolder:
    """Create the folder of a new run. By default, its id begins with the time and ends with a random part."""
    run_id = run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path = root / name / run_id
    try:
        path.mkdir(parents=True, exist_ok=False)
        number_run(path, root=root)
    except FileExistsError:
        raise UsageError(f"{path} exists.", hint="--resume continues it") from None
    except OSError as error:
        raise UsageError(
            f"the run folder {path} can't be created: {error.strerror}.",
            hint="--run-dir FOLDER on a writable disk",
        ) from None
    return RunFolder(path)


def number_run(path: Path, *, root: Path = ROOT) -> None:
    """Number a new run: one more than the highest number of all runs in `root`. The clock has no influence.

    Raises:
        OSError: the number can't be written.
    """
    if not (path / NUMBER).exists():
        (path / NUMBER).write_text(str(1 + max((_run_number(run) for run in _all_runs(root)), default=0)))


def _run_number(path: Path) -> int:
    """Return a run's number; 0 if the run is of an older version, which had no numbers."""
    try:
        text = read_regular(path / NUMBER, max_bytes=32).decode(errors="replace")
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0


def newest_run(name: str | None = None, *, root: Path = ROOT, only_trained: bool = False) -> RunFolder | None:
    """Return the newest run of a job, or of all jobs; with `only_trained`, of those that reached training, if any."""
    runs = _all_runs(root) if name is None else _runs_in(root / name)
    runs = ([path for path in runs if RunFolder(path).task.exists()] if only_trained else []) or runs
    return RunFolder(max(runs, key=_sort_key)) if runs else None


def runs_of_job(name: str, *, root: Path = ROOT) -> list[RunFolder]:
    """Return the runs of a job, in the order in which they were created."""
    return [RunFolder(path) for path in sorted(_runs_in(root / name), key=_sort_key)]


def _all_runs(root: Path) -> list[Path]:
    return [run for path in root.glob("*") for run in _runs_in(path)]


def _runs_in(path: Path) -> list[Path]:
    """Return the runs in a job's folder, or the folder itself if it is a run."""
    run = RunFolder(path)
    if run.task.exists() or run.logs.is_dir():
        return [path]
    return [folder for folder in path.glob("*") if folder.is_dir()]


def _sort_key(path: Path) -> tuple[int, str, str]:
    """Return a sort key: the run's number, then its start time from its id, else from its files."""
    number = _run_number(path)
    if re.match(r"[0-9]{8}-[0-9]{6}", path.name):
        return number, path.name, ""
    task = RunFolder(path).task
    modified = (task if task.exists() else path).stat().st_mtime
    return number, time.strftime("%Y%m%d-%H%M%S", time.localtime(modified)), path.name


def newest_saved_run(name: str, *, root: Path = ROOT) -> RunFolder | None:
    """Return the newest run of a job that has begun a save; if none has, the newest run that reached training.

    A run in `root` itself, which `--run-dir` named, is one of the job if its task says so.
    """
    saved = [path for path in (root / name).glob("*") if has_saves(RunFolder(path).checkpoints)]
    named = [path for path in root.glob("*") if has_saves(RunFolder(path).checkpoints)]
    saved += [path for path in named if _job_of(RunFolder(path)) == name]
    if saved:
        return RunFolder(max(saved, key=_sort_key))
    newest = newest_run(name, root=root, only_trained=True)
    return newest if newest is not None and newest.task.exists() else None


def _job_of(run: RunFolder) -> str:
    """Return the short name of the job that a run trains; empty if the run does not say it."""
    try:
        return read_task(run).short_job
    except UsageError:
        return ""


def run_of_checkpoint(checkpoint: Path) -> RunFolder:
    """Return the run that saved a checkpoint, even if the checkpoint has been moved to a folder of superseded ones."""
    absolute = checkpoint.absolute()
    checkpoint_folders = [
        parent for parent in absolute.parents if parent.name == RunFolder(parent.parent).checkpoints.name
    ]
    run_path = checkpoint_folders[0].parent if checkpoint_folders else absolute.parent.parent
    return RunFolder(run_path if checkpoint.is_absolute() else Path(os.path.relpath(run_path)))


def choose_run(name: str, *, run: str, resume: str | None) -> tuple[RunFolder | None, str | None]:
    """Return the folder to run in (None: a new folder), and the checkpoint to resume from: `newest`, a path, or None.

    `run` is the requested folder, or empty. `resume` is one of these:

    - None: the requested folder is resumed if it has a checkpoint.
    - An empty text: the requested folder is resumed. If there is none, the newest run of `name` is resumed.
    - A run or a checkpoint: this run is resumed. If `run` is another folder, it is instead a branch that starts from
      the checkpoint of `resume`, and the same command continues the branch later.
    - A URL of either in a remote store: the requested folder, or a new one, is such a branch.

    Raises:
        UsageError: there is no such run or checkpoint.
    """
    requested_run = RunFolder(Path(run)) if run else None
    if resume is None:
        return requested_run, ("newest" if requested_run is not None and has_saves(requested_run.checkpoints) else None)
    if not resume:
        newest = requested_run or newest_saved_run(name)
        if newest is None or not newest.path.is_dir():
            raise UsageError(f"there is no run of {name} to resume.", hint="the same command without --resume")
        return newest, "newest"
    if "://" in resume:
        return requested_run, resume
    origin, checkpoint = find_run(resume)
    if requested_run is None or requested_run.path.resolve() == origin.path.resolve():
        _refuse_superseded_checkpoint(origin, checkpoint)
        return origin, str(checkpoint or "newest")
    if has_saves(requested_run.checkpoints):
        return requested_run, "newest"
    return requested_run, str(checkpoint or newest_checkpoint(origin))


def check_resume(name: str, *, run: str, resume: str | None) -> None:
    """Check that `choose_run` finds what to resume, without a word about damaged checkpoints.

    Raises:
        UsageError: there is no such run or checkpoint.
    """
    if not resume:
        choose_run(name, run=run, resume=resume)
    elif "://" not in resume:
        origin, checkpoint = find_run(resume)
        if not run or Path(run).resolve() == origin.path.resolve():
            _refuse_superseded_checkpoint(origin, checkpoint)


def newest_checkpoint(run: RunFolder, *, reports_damaged: bool = True) -> Path:
    """Return the newest valid checkpoint; with `reports_damaged`, print newer damaged ones to standard error.

    Raises:
        CheckpointError: there is none.
    """
    path, refused = find_newest_usable(run.checkpoints)
    if path is None:
        raise no_usable_checkpoint(run.checkpoints, refused)
    for unusable in refused:
        if reports_damaged and not unusable.is_unfinished:
            print_line(str(unusable), sys.stderr)
    return path


def _refuse_superseded_checkpoint(run: RunFolder, checkpoint: Path | None) -> None:
    if checkpoint is not None and checkpoint.parent.resolve() != run.checkpoints.resolve():
        raise UsageError(
            f"{checkpoint} was set aside: {run.path} was resumed from an older checkpoint.",
            hint=f"--resume {checkpoint} --run-dir runs/BRANCH continues from it in the new folder runs/BRANCH",
        )


def find_run(reference: str | None, *, root: Path = ROOT, only_trained: bool = False) -> tuple[RunFolder, Path | None]:
    """Return the run that `reference` names, and the checkpoint if it names one; without a `reference`, the newest run.

    With `only_trained`, the newest run is the newest that reached training, if any did: `plan` and `verify` create
    folders too.

    Raises:
        UsageError: there is no such run.
    """
    if reference is None:
        newest = newest_run(root=root, only_trained=only_trained)
        if newest is None:
            raise UsageError("there is no run here yet.", where=str(root.resolve()), hint="paceline train job.py")
        return newest, None
    path = Path(reference)
    if not reference.strip():
        raise UsageError("the name of the run is empty: is a variable unset?", hint=_existing_runs_hint(root))
    if is_checkpoint(path):
        return run_of_checkpoint(path), path
    if not path.is_dir():
        message = (
            f"{reference} is not a folder, but a run must be one." if path.exists() else f"there is no run {reference}."
        )
        raise UsageError(message, cause=_suggest_run(path, root), hint=_newest_hint(path, root))
    run = RunFolder(path)
    if not (run.events.exists() or run.logs.exists() or list_checkpoints(run.checkpoints)):
        raise UsageError(
            f"{reference} is not a run folder.",
            cause=_suggest_run(path, root) or "it has neither events nor checkpoints",
            hint=_newest_hint(path, root),
        )
    return run, None


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, and not a run folder with a name such as `step-00000100`."""
    run = RunFolder(path)
    if not path.is_dir() or run.events.exists() or run.logs.exists():
        return False
    return (path / MANIFEST).exists() or parse_step(path) >= 0


def _suggest_run(path: Path, root: Path) -> str:
    """Return a question that suggests a run with a similar name, in the same folder or in `runs`; empty if none has."""
    runs = [*_all_runs(root), *(folder for folder in path.parent.glob("*") if _is_run(folder))]
    suggestion = closest_word(str(path), map(str, runs)) or closest_word(path.name, (run.name for run in runs))
    return (
        f"did you mean {next((str(run) for run in runs if suggestion in (str(run), run.name)), suggestion)}?"
        if suggestion
        else ""
    )


def _newest_hint(path: Path, root: Path) -> str:
    """Return a hint: the newest run of the job that `path` names, or else the newest runs."""
    newest = newest_run(path.name, root=root) if path.name else None
    return str(newest.path) if newest is not None else _existing_runs_hint(root)


def _existing_runs_hint(root: Path) -> str:
    """Return a hint that names the newest runs, of any job."""
    runs = sorted((run for run in _all_runs(root) if _is_run(run)), key=_sort_key, reverse=True)
    if not runs:
        return f"cd to the folder in which you train; there are no runs in {root.resolve()}"
    return f"it is one of: {first_names([str(run) for run in runs])}"


def _is_run(path: Path) -> bool:
    run = RunFolder(path)
    return path.is_dir() and (run.events.exists() or run.logs.is_dir())


def read_task(run: RunFolder) -> Task:
    """Return the task with which a run was started.

    Raises:
        UsageError: the run did not reach training, or the file is damaged.
    """
    if not os.path.lexists(run.task):
        raise UsageError(
            f"{run.path} does not record its job.",
            cause="it ended before its first step, or it belongs to plan or verify",
            hint="ls runs/*/, then the same command with another run",
        )
    try:
        return msgspec.convert(read_json(run.task), Task)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{run.task} differs from what was written: {error}.",
            cause="a damaged disk, or an edited file: it records the run's job",
            hint="the checkpoints are intact: paceline ckpt consolidate RUN --to FOLDER needs no job",
        ) from None
