"""The run folder: what was asked, what was decided, what happened."""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.store.checkpoints import all_steps

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


def newest_run(name: str | None = None, *, root: Path = ROOT) -> RunFolder | None:
    """The newest run of a job, or of all."""
    found = [path for path in root.glob(f"{name or '*'}/*") if path.is_dir()]
    return RunFolder(max(found, key=lambda path: path.name)) if found else None


def find_run(text: str | None, *, root: Path = ROOT) -> tuple[RunFolder, Path | None]:
    """A run folder, and the checkpoint in it that was named, if one was; nothing means the newest run.

    Raises:
        UsageError: there is no such run.
    """
    if text is None:
        newest = newest_run(root=root)
        if newest is None:
            raise UsageError("there is no run here yet.", where=str(root.resolve()), hint="paceline train job.py")
        return newest, None
    path = Path(text)
    if path.name.startswith("step-") and path.is_dir():
        return RunFolder(path.parent.parent), path
    if not path.is_dir():
        raise UsageError(f"there is no run {text}.", hint="ls runs/*/")
    run = RunFolder(path)
    if not (run.events.exists() or run.logs.exists() or all_steps(run.checkpoints)):
        raise UsageError(f"{text} is no run folder.", cause="it has neither events nor checkpoints", hint="ls runs/*/")
    return run, None
