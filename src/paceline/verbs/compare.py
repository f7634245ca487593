"""`compare` of runs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ExitCode, UsageError
from paceline.prove.compare import compare_recordings
from paceline.prove.prints import has_recording, read_recording
from paceline.store.runs import RunFolder
from paceline.watch.files import read_lines


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What was found."""

    exit_code: int
    text: str
    runs: list[dict[str, Any]] = field(default_factory=list)
    first_difference: dict[str, Any] | None = None


def compare(*runs: str) -> Compared:
    """Runs side by side; two recordings, to the first step and parameter where they part.

    Raises:
        UsageError: fewer than two, or a folder that is neither a run nor a recording.
    """
    if len(runs) < 2:
        raise UsageError(f"compare needs two runs, got {len(runs)}.", hint="paceline compare RUN RUN")
    paths = [Path(run) for run in runs]
    missing = [str(path) for path in paths if not path.is_dir()]
    if missing:
        raise UsageError(f"there is no run {missing[0]} to compare.", hint="ls runs/*/")
    if all(has_recording(path) for path in paths):
        return _recordings(paths)
    rows = [_row(RunFolder(path)) for path in paths]
    names = [name for name in rows[0] if name != "run"]
    lines = [f"{'':<20}" + "".join(f"{Path(row['run']).name:>28}" for row in rows)]
    lines += [f"{name:<20}" + "".join(f"{_shown(row.get(name)):>28}" for row in rows) for name in names]
    return Compared(exit_code=0, text="\n".join(lines), runs=rows)


def _recordings(paths: list[Path]) -> Compared:
    found = compare_recordings(read_recording(paths[0]), read_recording(paths[1]))
    code = ExitCode.DIFFERENT if found.first is not None else ExitCode.DONE
    return Compared(exit_code=int(code), text=found.text, first_difference=found.first)


def _row(run: RunFolder) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for record in read_lines(run.metrics):
        last |= record
    last.pop("time", None)
    return {"run": str(run.path), **last}


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value if value is not None else "")
