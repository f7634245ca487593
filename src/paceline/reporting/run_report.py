"""`report.html`: one self-contained page about one run, made from its folder alone."""

from html import escape
from pathlib import Path
from typing import Any

from paceline.config.job_reference import GIVEN
from paceline.filesystem.atomic_files import report_write_errors, write_text
from paceline.filesystem.run_lock import is_run_folder_locked
from paceline.reporting.curves import show_curves, show_statistics, show_time
from paceline.reporting.failures import last_failure, show_checkpoints, show_failures, show_torn
from paceline.reporting.forecast_section import show_foretold
from paceline.reporting.run_history import History, json_or_none, read_history
from paceline.reporting.settings_table import settings_of, show_settings
from paceline.reporting.staleness_section import show_staleness
from paceline.reporting.svg.style import STYLE
from paceline.reporting.verify_section import find_verdict, number, show_verdict
from paceline.run_folder.plan_file import ADVICE
from paceline.run_folder.run_folder import RunFolder


def write_report(run: RunFolder, *, to: Path | None = None) -> Path:
    """Write the page, in the run's folder or to a file, and return its path.

    Raises:
        UsageError: it can't be written.
    """
    to = to or run.report
    with report_write_errors(to):
        write_text(to, run_page(run))
    return to


def run_page(run: RunFolder) -> str:
    """Return the page's HTML."""
    history = read_history(run)
    answer, reason = find_verdict(run)
    parts = [
        _head(history, answer),
        show_torn(history),
        show_failures(run),
        show_curves(history),
        show_time(history),
        show_foretold(history),
        show_staleness(history),
        show_verdict(answer, reason),
        show_checkpoints(run),
        _sample(history),
        show_settings(run),
        _notes(history),
        show_statistics(history),
        _table("Plan", _flat(_decided(json_or_none(run.path / "plan.json")))),
        _table("Environment", _flat(json_or_none(run.path / "env.json"))),
    ]
    return document(f"{run.path.parent.name} · {run.path.name}", parts)


def document(title: str, parts: list[str]) -> str:
    """Return a whole page that loads nothing from the network."""
    body = "\n".join(part for part in parts if part)
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )
    return text.encode(errors="replace").decode()  # a lone surrogate can't be encoded


def status_of(history: History) -> str:
    """Return how the newest attempt ended, according to its events and its ranks' files.

    An attempt that no process holds any more and that recorded no end was killed: it failed.
    """
    failure = _failure_of(history)
    if failure is not None:
        step = failure.get("step")
        return f"failed at step {step}" if isinstance(step, int) and step > 0 else "failed"
    if _has_ended(history):
        return str(history.last_of("RunEnded").get("status"))
    if is_run_folder_locked(history.run.path):
        return "running"
    return "failed" if history.starts or history.steps else "not started"


def _has_ended(history: History) -> bool:
    started, ended = history.last_of("RunStarted"), history.last_of("RunEnded")
    return bool(ended) and history.events.index(ended) >= (history.events.index(started) if started else 0)


def _failure_of(history: History) -> dict[str, Any] | None:
    """Return the failure of the newest attempt, unless it ended well or a later attempt has begun."""
    attempt = history.last_of("RunStarted").get("attempt")
    began = attempt if isinstance(attempt, int) else 1
    return last_failure(history.run, after=began + _has_ended(history))


def _head(history: History, answer: dict[str, Any] | None) -> str:
    run, started, last = history.run, history.last_of("RunStarted"), history.last()
    total = started.get("total_steps")
    failed = (_failure_of(history) or {}).get("step")
    done = max(history.reached(), failed - 1 if isinstance(failed, int) else 0)
    of_total = f" of {total:,}" if isinstance(total, int) and total >= done else ""
    samples = history.samples()
    facts = [
        ("status", status_of(history)),
        ("layout", f"{started.get('layout', '?')} × {started.get('ranks', '?')}"),
        *_rules(run),
        ("steps", f"{done:,}{of_total}"),
        ("samples", f"{samples[-1][1]:,.0f}" if samples else "–"),
        ("loss", number(last.get("loss"))),
    ]
    facts += [(name.replace("/", " "), number(v)) for name, v in last.items() if name.startswith("eval/")][:4]
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    word = escape(str(answer["verdict"])) if answer else ""
    badge = f'<span class="badge {word}">verify: {word}</span>' if answer else ""
    job = str(started.get("job", run.path.parent.name)).removeprefix(f"{GIVEN}:")
    return f"<header><h1>{escape(job)} <small>{escape(run.path.name)}</small> {badge}</h1><dl>{cells}</dl></header>"


def _rules(run: RunFolder) -> list[tuple[str, str]]:
    """Return the update rule and the compression, if they make the training differ from one process."""
    asked = settings_of(run)
    found = [(name, asked[name][0]) for name in ("update", "compress") if name in asked]
    return [(name, value) for name, value in found if value != "sync"]


def _sample(history: History) -> str:
    last = next((e for e in reversed(history.of("EvalDone")) if isinstance(e.get("extra"), dict) and e["extra"]), None)
    if last is None:
        return ""
    texts = "".join(f"<h3>{escape(str(k))}</h3><pre>{escape(str(v))}</pre>" for k, v in last["extra"].items())
    return f"<section><h2>At step {escape(str(last.get('step')))}</h2>{texts}</section>"


def _notes(history: History) -> str:
    lines = [str(e.get("text")) for e in history.of("Note")]
    lines += [f"refused {e.get('path')}: {e.get('reason')}" for e in history.of("CheckpointRefused")]
    banner = history.last_of("RunStarted").get("banner")
    items = "".join(f"<li>{escape(str(x))}</li>" for x in [*(banner if isinstance(banner, list) else []), *lines])
    return f"<section><h2>Decisions and notes</h2><ul>{items}</ul></section>" if items else ""


def _table(title: str, rows: dict[str, Any]) -> str:
    if not rows:
        return ""
    body = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<section><details><summary>{title}</summary><table>{body}</table></details></section>"


def _decided(plan: Any) -> Any:
    """Return the plan without the advice that it was chosen from."""
    return {key: item for key, item in plan.items() if key not in ADVICE} if isinstance(plan, dict) else plan


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return {key: item for key, item in found.items() if key != "notes"}
