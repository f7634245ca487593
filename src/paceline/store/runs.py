"""The run folder: what was asked, what was decided, what happened."""

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.store.checkpoints import all_steps, newest_good, was_saved

ROOT = Path("runs")


@dataclass(frozen=True)
class RunFolder:
    """One run's folder and the places in it."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Where each attempt's logs are."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """What happened, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """The numbers of each logged step, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def task(self) -> Path:
        """What was asked for, of a run that came to train."""
        return self.path / "task.json"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    def attempt_folder(self, number: int) -> Path:
        """The logs of one attempt."""
        return self.logs / f"attempt-{number}"

    def next_attempt(self) -> int:
        """The number of an attempt that begins now."""
        numbers = [int(p.name[8:]) for p in self.logs.glob("attempt-*") if p.name[8:].isdigit()]
        return max(numbers, default=0) + 1


def new_run(name: str, *, root: Path = ROOT, run_id: str | None = None) -> RunFolder:
    """Make the folder of a new run; ids sort by time and never meet."""
    run_id = run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path = root / name / run_id
    try:
        path.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise UsageError(f"{path} exists.", hint="--resume to go on with it") from None
    except OSError as error:
        raise UsageError(
            f"the run folder {path} can't be made: {error.strerror}.",
            hint="--run-dir FOLDER on a disk you may write",
        ) from None
    return RunFolder(path)


def newest_run(name: str | None = None, *, root: Path = ROOT, trains: bool = False) -> RunFolder | None:
    """The newest run of a job, or of all; `trains`: of those that came to train, where there is one."""
    found = [run for path in root.glob(name or "*") for run in _runs_in(path)]
    found = ([path for path in found if RunFolder(path).task.exists()] if trains else []) or found
    return RunFolder(max(found, key=_begun)) if found else None


def _runs_in(path: Path) -> list[Path]:
    """Of a job's folder, or the folder itself where a run was told to be there."""
    own = RunFolder(path)
    if own.task.exists() or own.logs.is_dir():
        return [path]
    return [each for each in path.glob("*") if each.is_dir()]


def _begun(path: Path) -> tuple[str, str]:
    """When, as ids say it; a folder that was named otherwise says it by what it holds."""
    if re.match(r"\d{8}-\d{6}", path.name):
        return path.name, ""
    task = RunFolder(path).task
    made = (task if task.exists() else path).stat().st_mtime
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(made)), path.name


def newest_saved_run(name: str, *, root: Path = ROOT) -> RunFolder | None:
    """The newest run of a job that has saved something; where none has, the newest."""
    saved = [path for path in root.glob(f"{name}/*") if was_saved(RunFolder(path).checkpoints)]
    return RunFolder(max(saved, key=lambda path: path.name)) if saved else newest_run(name, root=root)


def run_of(checkpoint: Path) -> RunFolder:
    """The run that a checkpoint was saved by, also where it was set aside there."""
    whole = checkpoint.absolute()
    places = [parent for parent in whole.parents if parent.name == RunFolder(parent.parent).checkpoints.name]
    found = places[0].parent if places else whole.parent.parent
    return RunFolder(found if checkpoint.is_absolute() else Path(os.path.relpath(found)))


def choose_run(name: str, *, run: str, resume: str | None) -> tuple[RunFolder | None, str | None]:
    """The folder to run in (None: a new one), and what to go on from: `newest`, a checkpoint, or nothing.

    `run` is the folder that was asked for, or empty. `resume` is a run, a checkpoint, empty for the newest run of
    `name`, or None: then a folder in which something was saved is gone on with. With both, `run` is a branch that
    begins at the other's checkpoint; the same words again go on with the branch.

    Raises:
        UsageError: there is no such run or checkpoint.
    """
    own = RunFolder(Path(run)) if run else None
    if resume is None:
        return own, ("newest" if own is not None and was_saved(own.checkpoints) else None)
    if not resume:
        found = own or newest_saved_run(name)
        if found is None or not found.path.is_dir():
            raise UsageError(f"there is no run of {name} to go on with.", hint="the same without --resume")
        return found, "newest"
    origin, checkpoint = find_run(resume)
    if own is None or own.path.resolve() == origin.path.resolve():
        _check_not_aside(origin, checkpoint)
        return origin, str(checkpoint or "newest")
    if was_saved(own.checkpoints):
        return own, "newest"
    checkpoint = checkpoint or newest_good(origin.checkpoints)[0]
    if checkpoint is None:
        raise UsageError(f"{origin.path} has no checkpoint to begin from.", hint=f"paceline ckpt ls {origin.path}")
    return own, str(checkpoint)


def _check_not_aside(run: RunFolder, checkpoint: Path | None) -> None:
    if checkpoint is not None and checkpoint.parent.resolve() != run.checkpoints.resolve():
        raise UsageError(
            f"{checkpoint} was set aside: {run.path} went on from an older checkpoint.",
            hint=f"--resume {checkpoint} --run-dir runs/BRANCH to go on from it in a folder of its own",
        )


def find_run(text: str | None, *, root: Path = ROOT, trains: bool = False) -> tuple[RunFolder, Path | None]:
    """A run folder, and the checkpoint in it that was named, if one was; nothing means the newest run, and where it
    `trains` the newest that does: what `plan` and `verify` keep of themselves are folders too.

    Raises:
        UsageError: there is no such run.
    """
    if text is None:
        newest = newest_run(root=root, trains=trains)
        if newest is None:
            raise UsageError("there is no run here yet.", where=str(root.resolve()), hint="paceline train job.py")
        return newest, None
    path = Path(text)
    if path.name.startswith("step-") and path.is_dir():
        return run_of(path), path
    if not path.is_dir():
        raise UsageError(f"there is no run {text}.", hint="ls runs/*/")
    run = RunFolder(path)
    if not (run.events.exists() or run.logs.exists() or all_steps(run.checkpoints)):
        raise UsageError(f"{text} is no run folder.", cause="it has neither events nor checkpoints", hint="ls runs/*/")
    return run, None
