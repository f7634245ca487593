"""The failures of a run: failed attempts, torn files, and checkpoints that differ from their digests."""

from html import escape
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    LATEST,
    check_checkpoint,
    list_checkpoints,
    parse_step,
    resolve_mark,
)
from paceline.console.formatting import format_size
from paceline.errors import CheckpointError, MachineError
from paceline.filesystem.atomic_files import folder_bytes
from paceline.launch.failures.failure_record import FIRST_FAILURE, FORKSERVER_RANK
from paceline.reporting.run_history import History, json_or_none
from paceline.run_folder.run_folder import RunFolder

_MOST_BYTES = 4 << 30


def show_torn(history: History) -> str:
    """Return a notice about lines that could not be read."""
    said = [f"{count} line{'s' * (count > 1)} of {name}.jsonl" for name, count in history.torn.items()]
    if not said:
        return ""
    return f'<p class="notice">Left out, because it could not be read: {escape(" and ".join(said))}. A kill or a full disk can cut off a line.</p>'


def last_failure(run: RunFolder, *, after: int) -> dict[str, Any] | None:
    """Return the first failure of the newest attempt to train, if that is attempt `after` or a later one."""
    trained = [folder for folder in _attempts(run) if _number_of(folder) >= after and _trains(folder)]
    return failures_of(trained[-1])[0] if trained else None


def _attempts(run: RunFolder) -> list[Path]:
    return sorted(run.logs.glob("attempt-*"), key=lambda p: (len(p.name), p.name))


def _number_of(attempt: Path) -> int:
    number = attempt.name.removeprefix("attempt-")
    return int(number) if number.isdecimal() else 0


def _trains(attempt: Path) -> bool:
    """Return whether the attempt trained the run and did not only evaluate it."""
    request = json_or_none(attempt / "request.json")
    payload = request.get("payload") if isinstance(request, dict) else None
    return not isinstance(payload, dict) or payload.get("verb", "train") == "train"


def show_failures(run: RunFolder) -> str:
    """Show each failed attempt: the first rank that failed, its exception, and the user's line."""
    parts = [text for folder in _attempts(run) if (text := _attempt(folder))]
    return f"<section><h2>Failures</h2>{''.join(parts)}</section>" if parts else ""


def failures_of(folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the first failure of an attempt, and the others in the order in which they were written."""
    left = [f for path in folder.glob("failure-*.json") if isinstance(f := json_or_none(path), dict) and "rank" in f]
    left.sort(key=_when)
    named = json_or_none(folder / FIRST_FAILURE)
    first = named if isinstance(named, dict) and "rank" in named else next(iter(left), None)
    rest = [f for f in left if first is not None and f["rank"] != first["rank"]]
    return first, rest


def _attempt(folder: Path) -> str:
    first, rest = failures_of(folder)
    if first is None:
        return ""
    number = folder.name.removeprefix("attempt-")
    where = f"{first['where']}, " if first.get("where") else ""
    step = f" at step {first['step']}" if isinstance(first.get("step"), int) and first["step"] else ""
    what = f"killed by {first.get('message')}" if first.get("kind") == "signal" else _named(first)
    who = "the process that starts the ranks" if first["rank"] == FORKSERVER_RANK else f"rank {first['rank']}"
    head = f"<p><strong>Attempt {escape(number)}{step}: {escape(who)}</strong>, {escape(where + what)}</p>"
    source = f"<pre>{escape(str(first['source']))}</pre>" if first.get("source") else ""
    advice = "\n".join(str(first.get("screen") or "").splitlines()[1:])
    advice = f"<pre>{escape(advice)}</pre>" if advice else ""
    teller = first["rank"] if first.get("told_by") is None else first["told_by"]
    log = Path("logs") / folder.name / ("" if first["rank"] == FORKSERVER_RANK else f"rank-{teller}.log")
    return f'<div class="failure">{head}{source}{advice}<p class="soft">{escape(str(log))}</p>{_others(rest)}</div>'


def _when(failure: dict[str, Any]) -> int:
    value = failure.get("monotonic_ns")
    return value if isinstance(value, int) else 0


def _others(rest: list[dict[str, Any]]) -> str:
    if not rest:
        return ""
    items = "".join(f"<li>rank {escape(str(f['rank']))}: {escape(_named(f)[:300])}</li>" for f in rest)
    return f"<details><summary>what the other ranks said as they stopped</summary><ul>{items}</ul></details>"


def _named(failure: dict[str, Any]) -> str:
    return f"{failure.get('kind')}: {failure.get('message')}"


def show_checkpoints(run: RunFolder) -> str:
    """Show every checkpoint; if all together are small, each is read and compared with its digests."""
    steps = list_checkpoints(run.checkpoints)
    if not steps:
        return ""
    marks = {mark: resolve_mark(run.checkpoints, mark) for mark in (LATEST, BEST)}
    whole = sum(folder_bytes(path) for path in steps)
    rows = []
    for path in steps:
        word, reason = _state(path) if whole <= _MOST_BYTES else ("not read", "paceline ckpt verify reads it")
        badges = "".join(f'<span class="badge">{mark}</span> ' for mark, at in marks.items() if at == path)
        shown = {"good": "bitwise", "bad": "different"}.get(word, "")
        rows.append(
            f"<tr><td>{parse_step(path):,}</td><td>{format_size(folder_bytes(path))}</td>"
            f'<td><span class="badge {shown}">{word}</span> {badges}</td><td>{escape(reason or path.name)}</td></tr>'
        )
    head = "<tr><th>step</th><th>size</th><th></th><th></th></tr>"
    return f'<section><h2>Checkpoints</h2><div class="wide"><table>{head}{"".join(rows)}</table></div></section>'


def _state(path: Path) -> tuple[str, str]:
    try:
        check_checkpoint(path)
    except (CheckpointError, MachineError) as error:
        return "bad", error.what
    return "good", ""
