"""`report.html`: one self-contained page about one run, made from its folder."""

from html import escape
from pathlib import Path
from typing import Any

from paceline.config.job_reference import OBJECT_PREFIX
from paceline.console.formatting import plural
from paceline.filesystem.atomic_files import report_write_errors, write_text
from paceline.filesystem.run_lock import is_run_folder_locked
from paceline.reporting.curves import show_curves, show_statistics, show_time
from paceline.reporting.failures import newest_failure, show_checkpoints, show_failures, show_unreadable_lines
from paceline.reporting.forecast_section import show_forecast
from paceline.reporting.goodput_section import show_goodput
from paceline.reporting.nodes_section import show_nodes
from paceline.reporting.run_history import History, json_or_none, read_history
from paceline.reporting.settings_table import read_settings, show_settings
from paceline.reporting.staleness_section import show_staleness
from paceline.reporting.svg.style import STYLE
from paceline.reporting.verify_section import find_verdict, format_number, read_gaps, show_verdict
from paceline.run_folder.plan_file import ADVICE
from paceline.run_folder.run_folder import RunFolder
from paceline.run_folder.signs_of_life import MAX_SILENT_SECONDS, distant_host, silent_seconds


def write_report(run: RunFolder, *, to: Path | None = None) -> Path:
    """Write the page, in the run's folder or to a file, and return its path.

    Raises:
        UsageError: the page can't be written.
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
        _show_head(history, answer),
        show_unreadable_lines(history),
        show_failures(history),
        show_goodput(history),
        show_curves(history),
        show_time(history),
        show_forecast(history),
        show_staleness(history),
        show_nodes(history),
        show_verdict(answer, reason),
        show_checkpoints(run),
        _show_evaluation_texts(history),
        show_settings(run),
        _show_notes(history),
        show_statistics(history),
        _show_table("Plan", _flatten(_without_advice(json_or_none(run.path / "plan.json")))),
        _show_table("Environment", _flatten(json_or_none(run.path / "env.json"))),
    ]
    return html_document(f"{run.path.parent.name} · {run.path.name}", parts)


def html_document(title: str, parts: list[str]) -> str:
    """Return a complete HTML page that loads nothing from the network."""
    body = "\n".join(part for part in parts if part)
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )
    return text.encode(errors="replace").decode()  # a lone surrogate can't be encoded


def run_status(history: History) -> str:
    """Return the status of the newest attempt, according to its events and the files of its ranks.

    If the attempt has no recorded end and no process holds the lock of the run folder, the attempt was killed, and its
    status is "failed".
    """
    failure = newest_failure(history)
    if failure is not None:
        step = failure.get("step")
        return f"failed at step {step}" if isinstance(step, int) and step > 0 else "failed"
    if history.has_ended:
        return str(history.last_event("RunEnded").get("status"))
    if distant_host(history.run) and silent_seconds(history.run) > MAX_SILENT_SECONDS:
        return f"no sign of life for {silent_seconds(history.run):.0f} s"
    if is_run_folder_locked(history.run.path):
        return "running"
    return "failed" if history.starts or history.steps else "not started"


def _show_head(history: History, answer: dict[str, Any] | None) -> str:
    run, started, values = history.run, history.last_event("RunStarted"), history.latest_values()
    total = started.get("total_steps")
    failed_step = (newest_failure(history) or {}).get("step")
    last_step = max(history.last_step(), failed_step - 1 if isinstance(failed_step, int) else 0)
    of_total = f" of {total:,}" if isinstance(total, int) and total >= last_step else ""
    samples = history.samples()
    facts = [
        ("status", run_status(history)),
        ("layout", f"{started.get('layout', '?')} × {started.get('ranks', '?')}"),
        *_update_rules(run),
        ("steps", f"{last_step:,}{of_total}"),
        ("samples", f"{samples[-1][1]:,.0f}" if samples else "–"),
        ("loss", format_number(values.get("loss"))),
    ]
    facts += [(name.replace("/", " "), format_number(v)) for name, v in values.items() if name.startswith("eval/")][:4]
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    verdict = escape(str(answer["verdict"])) if answer else ""
    badge = f'<span class="badge {verdict}">verify: {verdict}</span>' if answer else ""
    num_gaps = len(read_gaps(answer or {}))
    badge += f" <small>{plural(num_gaps, 'thing')} not exercised</small>" if num_gaps else ""
    job = str(started.get("job", run.path.parent.name)).removeprefix(f"{OBJECT_PREFIX}:")
    return f"<header><h1>{escape(job)} <small>{escape(run.path.name)}</small> {badge}</h1><dl>{cells}</dl></header>"


def _update_rules(run: RunFolder) -> list[tuple[str, str]]:
    """Return the update rule and the compression, if they are not the default."""
    settings = read_settings(run)
    rows = [(name, settings[name][0]) for name in ("update", "compress") if name in settings]
    return [(name, value) for name, value in rows if value != "sync"]


def _show_evaluation_texts(history: History) -> str:
    """Show the texts that the job returned with its last evaluation, such as generated samples."""
    last = next(
        (e for e in reversed(history.events_of_kind("EvalDone")) if isinstance(e.get("extra"), dict) and e["extra"]),
        None,
    )
    if last is None:
        return ""
    texts = "".join(f"<h3>{escape(str(k))}</h3><pre>{escape(str(v))}</pre>" for k, v in last["extra"].items())
    return f"<section><h2>At step {escape(str(last.get('step')))}</h2>{texts}</section>"


def _show_notes(history: History) -> str:
    lines = [str(e.get("text")) for e in history.events_of_kind("Note")]
    lines += [f"refused {e.get('path')}: {e.get('reason')}" for e in history.events_of_kind("CheckpointRefused")]
    lines += [f"step {e.get('step')} not uploaded: {e.get('reason')}" for e in history.events_of_kind("UploadFailed")]
    banner = history.last_event("RunStarted").get("banner")
    items = "".join(f"<li>{escape(str(x))}</li>" for x in [*(banner if isinstance(banner, list) else []), *lines])
    return f"<section><h2>Decisions and notes</h2><ul>{items}</ul></section>" if items else ""


def _show_table(title: str, rows: dict[str, Any]) -> str:
    if not rows:
        return ""
    body = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<section><details><summary>{title}</summary><table>{body}</table></details></section>"


def _without_advice(plan: Any) -> Any:
    """Return the content of plan.json without the advice, which `plan` shows and a run does not need."""
    return {key: item for key, item in plan.items() if key not in ADVICE} if isinstance(plan, dict) else plan


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as a flat one with dotted keys, without `notes`."""
    if not isinstance(value, dict):
        return {}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return {key: item for key, item in flat.items() if key != "notes"}
