"""The failures of a run: failed attempts, unreadable lines, and checkpoints that differ from their digests."""

from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    LATEST,
    check_checkpoint,
    list_checkpoints,
    parse_step,
    resolve_mark,
)
from paceline.console.formatting import format_size
from paceline.errors import CheckpointError, ExitCode, MachineError
from paceline.events import Restarted
from paceline.filesystem.atomic_files import folder_bytes, read_json
from paceline.launch.failures.failure_record import FIRST_FAILURE, FORKSERVER_RANK, Failure
from paceline.launch.several_nodes.node_history import describe_attempt_ends
from paceline.launch.several_nodes.node_stays import lost_node_lines, read_node_stays
from paceline.reporting.run_history import History, json_or_none
from paceline.run_folder.run_folder import RunFolder

_MAX_CHECKED_BYTES = 4 << 30


def show_unreadable_lines(history: History) -> str:
    """Return a notice that counts the unreadable lines of the run's log files, as HTML."""
    counts = [f"{count} line{'s' * (count > 1)} of {name}.jsonl" for name, count in history.num_unreadable.items()]
    if not counts:
        return ""
    return f'<p class="notice">Unreadable and left out: {escape(" and ".join(counts))}. A kill or a full disk can cut off a line.</p>'


def last_failure(run: RunFolder, *, first_attempt: int) -> dict[str, Any] | None:
    """Return the first failure of the newest training attempt, if the attempt's number is at least `first_attempt`."""
    attempt = newest_training_attempt(run)
    return read_failures(attempt)[0] if attempt is not None and _attempt_number(attempt) >= first_attempt else None


def newest_failure(history: History) -> dict[str, Any] | None:
    """Return the failure of the newest attempt, or None if it has not failed.

    An attempt that was refused before it started does not count after an attempt that has ended: the run is unchanged.
    """
    attempt, has_ended = history.last_event("RunStarted").get("attempt"), history.has_ended
    first_attempt = attempt if isinstance(attempt, int) else 1
    failure = last_failure(history.run, first_attempt=first_attempt + has_ended)
    is_refused = failure is not None and failure.get("exit_code") == ExitCode.REFUSED
    return None if has_ended and is_refused else failure


def newest_training_attempt(run: RunFolder) -> Path | None:
    """Return the folder of the newest attempt that trained, or None."""
    return next((folder for folder in reversed(_attempt_folders(run)) if _is_training_attempt(folder)), None)


def _attempt_folders(run: RunFolder) -> list[Path]:
    return sorted((path for path in run.logs.glob("attempt-*") if _attempt_number(path)), key=_attempt_number)


def _attempt_number(attempt: Path) -> int:
    number = attempt.name.removeprefix("attempt-")
    return int(number) if number.isdecimal() else 0


def _is_training_attempt(attempt: Path) -> bool:
    """Return True if the attempt trained the run, False if it only evaluated it."""
    request = json_or_none(attempt / "request.json")
    payload = request.get("payload") if isinstance(request, dict) else None
    return not isinstance(payload, dict) or payload.get("verb", "train") == "train"


def show_failures(history: History) -> str:
    """Return a section with each failed attempt: the first rank that failed, its exception, and the user's line.

    If the run restarted by itself, the section also says from which step, and after how many seconds. For a run on
    several nodes, it begins with the lines of `why` about nodes that were lost, left or came.
    """
    restarts = {restart.attempt: restart for restart in read_restarts(history)}
    lines = _node_lines(history)
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    parts = [f"<ul>{items}</ul>"] if lines else []
    for folder in _attempt_folders(history.run):
        restart = None if lines else restarts.get(_attempt_number(folder) + 1)
        if text := _show_attempt(folder, restart=restart):
            parts.append(text)
    return f"<section><h2>Failures</h2>{''.join(parts)}</section>" if parts else ""


def _node_lines(history: History) -> list[str]:
    attempts = read_node_stays(history.run.path)
    if not attempts:
        return []
    return [*attempt_lines(history), *lost_node_lines(history.run.path, attempts[-1].attempt)]


def attempt_lines(history: History) -> list[str]:
    """Return a line about the end of each attempt that another one followed, in the order of time."""
    run = history.run
    restarts = {r.attempt - 1: f"attempt {r.attempt - 1}: {r.reason}; {r.outcome}" for r in read_restarts(history)}
    failures = {}
    for folder in [path for path in _attempt_folders(run) if _is_training_attempt(path)][:-1]:
        with suppress(OSError, ValueError, msgspec.ValidationError):
            failure = msgspec.convert(read_json(folder / FIRST_FAILURE), Failure)
            if failure.exit_code != ExitCode.REFUSED:
                failures[_attempt_number(folder)] = f"{folder.name.replace('-', ' ')}: {failure.summary}"
    return list(describe_attempt_ends(run, history.events, restarts=restarts, failures=failures).values())


def read_failures(folder: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the first failure of an attempt, and the other failures in order of time.

    Under another launcher nothing but the ranks' own records says which was first. Lost connections sort last there.
    """
    failures = [
        f for path in folder.glob("failure-*.json") if isinstance(f := json_or_none(path), dict) and "rank" in f
    ]
    failures.sort(key=lambda failure: (_is_lost_connection(failure), _failure_time(failure)))
    recorded = json_or_none(folder / FIRST_FAILURE)
    first = recorded if isinstance(recorded, dict) and "rank" in recorded else next(iter(failures), None)
    other_failures = [f for f in failures if first is not None and f["rank"] != first["rank"]]
    return first, other_failures


def read_restarts(history: History) -> list[Restarted]:
    """Return the run's restarts; an event that another version wrote differently is left out."""
    restarts = []
    for event in history.events_of_kind(Restarted.__name__):
        with suppress(msgspec.ValidationError):
            restarts.append(msgspec.convert(event, Restarted))
    return restarts


def _show_attempt(folder: Path, *, restart: Restarted | None) -> str:
    first, other_failures = read_failures(folder)
    if first is None:
        return ""
    number = folder.name.removeprefix("attempt-")
    location = f"{first['where']}, " if first.get("where") else ""
    step = f" at step {first['step']}" if isinstance(first.get("step"), int) and first["step"] else ""
    description = f"killed by {first.get('message')}" if first.get("kind") == "signal" else _failure_text(first)
    if first["rank"] == FORKSERVER_RANK:
        head = f"<p><strong>Attempt {escape(number)}{step}</strong>: {escape(str(first.get('message')))}</p>"
    else:
        process = f"rank {first['rank']}"
        text = escape(location + description)
        head = f"<p><strong>Attempt {escape(number)}{step}: {escape(process)}</strong>, {text}</p>"
    source = f"<pre>{escape(str(first['source']))}</pre>" if first.get("source") else ""
    links = first.get("broken_links")
    link_lines = map(str, links) if isinstance(links, list) else ()
    advice = "\n".join([*link_lines, *str(first.get("screen") or "").splitlines()[1:]])
    advice = f"<pre>{escape(advice)}</pre>" if advice else ""
    log_rank = first["rank"] if first.get("told_by") is None else first["told_by"]
    log = Path("logs") / folder.name / ("" if first["rank"] == FORKSERVER_RANK else f"rank-{log_rank}.log")
    outcome = f"<p>{escape(restart.outcome)}</p>" if restart is not None else ""
    soft = f'<p class="soft">{escape(str(log))}</p>'
    return f'<div class="failure">{head}{source}{advice}{outcome}{soft}{_show_others(other_failures)}</div>'


def _failure_time(failure: dict[str, Any]) -> int:
    value = failure.get("monotonic_ns")
    return value if isinstance(value, int) else 0


def _is_lost_connection(failure: dict[str, Any]) -> bool:
    """Return whether this failure only follows from another rank's exit; False for a record of another version."""
    try:
        return msgspec.convert(failure, Failure).is_lost_connection
    except msgspec.ValidationError:
        return False


def _show_others(failures: list[dict[str, Any]]) -> str:
    if not failures:
        return ""
    items = "".join(f"<li>rank {escape(str(f['rank']))}: {escape(_failure_text(f)[:300])}</li>" for f in failures)
    return f"<details><summary>the errors of the other ranks</summary><ul>{items}</ul></details>"


def _failure_text(failure: dict[str, Any]) -> str:
    return f"{failure.get('kind')}: {failure.get('message')}"


def show_checkpoints(run: RunFolder) -> str:
    """Return a section with every checkpoint.

    If all checkpoints together have at most 4 GiB, each is read and compared with its digests. Otherwise none is read.
    """
    steps = list_checkpoints(run.checkpoints)
    if not steps:
        return ""
    pointers = {mark: resolve_mark(run.checkpoints, mark) for mark in (LATEST, BEST)}
    total_bytes = sum(folder_bytes(path) for path in steps)
    rows = []
    for path in steps:
        state, reason = (
            _checkpoint_state(path)
            if total_bytes <= _MAX_CHECKED_BYTES
            else ("not read", "paceline ckpt verify reads it")
        )
        badges = "".join(f'<span class="badge">{mark}</span> ' for mark, marked in pointers.items() if marked == path)
        badge_class = {"good": "bitwise", "bad": "different"}.get(state, "")
        rows.append(
            f"<tr><td>{parse_step(path):,}</td><td>{format_size(folder_bytes(path))}</td>"
            f'<td><span class="badge {badge_class}">{state}</span> {badges}</td><td>{escape(reason or path.name)}</td></tr>'
        )
    head = "<tr><th>step</th><th>size</th><th></th><th></th></tr>"
    return f'<section><h2>Checkpoints</h2><div class="wide"><table>{head}{"".join(rows)}</table></div></section>'


def _checkpoint_state(path: Path) -> tuple[str, str]:
    """Return "good" and no reason, or "bad" and the reason."""
    try:
        check_checkpoint(path)
    except (CheckpointError, MachineError) as error:
        return "bad", error.what
    return "good", ""
