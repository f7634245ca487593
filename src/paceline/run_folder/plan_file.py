"""The plan file, plan.json: the execution plan of a run, and the advice of `paceline plan`."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.filesystem.atomic_files import read_json, read_regular, write_json, write_text

FILE_NAME = "plan.json"
_ACTIVITY_FILE = "doing.txt"
# The keys of the advice. `case` says what fits on one device (1: everything, 2: single layers, 3: not even a layer),
# and `facts` is the model profile.
ADVICE = ("case", "recommended", "plans", "limits", "facts", "efficiency", "cluster")


def write_plan_file(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan that every rank follows, `ExecutionPlan.as_json`; existing advice is kept."""
    advice = {key: value for key, value in _read_or_empty(folder / FILE_NAME).items() if key in ADVICE}
    write_json(folder / FILE_NAME, {**plan, **advice})


def write_advice(folder: Path, advice: Mapping[str, Any]) -> None:
    """Write the advice from the answer of `paceline plan`: its keys in `ADVICE`. The execution plan is kept."""
    plan = {key: value for key, value in _read_or_empty(folder / FILE_NAME).items() if key not in ADVICE}
    write_json(folder / FILE_NAME, {**plan, **{key: advice[key] for key in ADVICE if key in advice}})


def read_advice(path: Path) -> dict[str, Any]:
    """Return the advice in a run's folder or in a plan file.

    Raises:
        UsageError: there is no advice.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.exists():
        raise UsageError(f"there is no plan in {path}.", hint="paceline plan job.py --run-dir FOLDER writes one")
    content = _read_or_empty(file)
    if not _is_list_of_plans(content.get("plans")):
        raise UsageError(
            f"{file} has no planned layouts.",
            cause="a run wrote it and stored only its own layout, or it is not a file of `paceline plan`",
            hint="paceline plan job.py --run-dir FOLDER writes one",
        )
    return {key: value for key, value in content.items() if key in ADVICE}


def write_activity(folder: Path, activity: str) -> None:
    """Write the current activity of a plan, for a process that waits for it; an empty text removes the file."""
    with suppress(OSError):
        if activity:
            write_text(folder / _ACTIVITY_FILE, activity)
        else:
            (folder / _ACTIVITY_FILE).unlink(missing_ok=True)


def read_activity(folder: Path) -> str:
    """Return the activity that was written last, or "starting processes" if none can be read."""
    try:
        return read_regular(folder / _ACTIVITY_FILE).decode(errors="replace")
    except (OSError, ValueError):
        return "starting processes"


def _is_list_of_plans(plans: Any) -> bool:
    return (
        isinstance(plans, list) and bool(plans) and all(isinstance(plan, dict) and "layout" in plan for plan in plans)
    )


def _read_or_empty(file: Path) -> dict[str, Any]:
    """Return the file's content; empty if it can't be read, so that a new plan replaces it."""
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
