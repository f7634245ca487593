"""`report.html`: one self-contained page about one run, made from its folder alone."""

from html import escape
from pathlib import Path
from typing import Any

from paceline.store.checkpoints import BEST, LATEST, all_steps, marked, step_of
from paceline.store.disk import read_json, write_text
from paceline.store.runs import RunFolder
from paceline.watch.files import read_lines
from paceline.watch.style import STYLE
from paceline.watch.svg import Curve, chart, stacked


def write_report(run: RunFolder) -> Path:
    """Write the page and return its path."""
    write_text(run.report, page(run))
    return run.report


def page(run: RunFolder) -> str:
    """The page's HTML."""
    metrics = _by_step(run)
    events = [event for event in read_lines(run.events) if "event" in event]
    verify = _verdict(run)
    parts = [
        _head(run, metrics, events, verify),
        _curves(metrics, events),
        _time(metrics),
        _verify(verify),
        _checkpoints(run),
        _sample(events),
        _notes(events),
        _table("Settings", _settings(run)),
        _table("Plan", _flat(_json(run.path / "plan.json"))),
        _table("Environment", _flat(_json(run.path / "env.json"))),
    ]
    title = escape(f"{run.path.parent.name} · {run.path.name}")
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _by_step(run: RunFolder) -> dict[int, dict[str, Any]]:
    """The numbers of each step; a step that was done again replaces its first writing."""
    found: dict[int, dict[str, Any]] = {}
    for record in read_lines(run.metrics):
        step = record.get("step")
        if isinstance(step, int):
            found.setdefault(step, {}).update(record)
    return dict(sorted(found.items()))


def _head(run: RunFolder, metrics: dict[int, dict[str, Any]], events: list[dict[str, Any]], verify: Any) -> str:
    started: dict[str, Any] = next((e for e in reversed(events) if e["event"] == "RunStarted"), {})
    ended: dict[str, Any] = next((e for e in reversed(events) if e["event"] == "RunEnded"), {})
    last = _last(metrics)
    status = str(ended.get("status", "not ended"))
    facts = [
        ("status", status),
        ("layout", f"{started.get('layout', '?')} × {started.get('ranks', '?')}"),
        ("steps", f"{max(metrics, default=0):,}"),
        ("loss", _number(last.get("loss"))),
    ]
    facts += [(name.replace("/", " "), _number(v)) for name, v in last.items() if name.startswith("eval/")][:4]
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    badge = ""
    if verify:
        word = str(verify["verdict"])
        badge = f'<span class="badge {escape(word)}">verify: {escape(word)}</span>'
    job, name = escape(str(started.get("job", run.path.parent.name))), escape(run.path.name)
    return f"<header><h1>{job} <small>{name}</small> {badge}</h1><dl>{cells}</dl></header>"


def _curves(metrics: dict[int, dict[str, Any]], events: list[dict[str, Any]]) -> str:
    names = sorted({name for record in metrics.values() for name in record} - {"step", "time"})
    resumes = [int(e["resumed_from"]) for e in events if e["event"] == "RunStarted" and e.get("resumed_from")]
    groups: list[tuple[str, list[str]]] = [("loss", [n for n in names if n == "loss" or n.startswith("loss/")])]
    groups += [(n, [n]) for n in names if n.startswith("eval/")]
    plain = ("lr", "grad_norm", "tokens_per_second", "samples_per_second", "memory/peak_gib")
    groups += [(n, [n]) for n in plain if n in names]
    charts = [
        chart(title, [Curve(name=n, points=_points(metrics, n)) for n in members], marks=resumes)
        for title, members in groups
        if members
    ]
    return f'<section><h2>Curves</h2><div class="charts">{"".join(charts)}</div></section>' if charts else ""


def _points(metrics: dict[int, dict[str, Any]], name: str) -> list[tuple[float, float]]:
    found = []
    for step, record in metrics.items():
        if name in record:
            try:
                found.append((float(step), float(record[name])))
            except (TypeError, ValueError):
                continue
    return found


def _time(metrics: dict[int, dict[str, Any]]) -> str:
    kinds = ("compute", "communication", "data", "evaluation", "checkpoint")
    totals = dict.fromkeys(kinds, 0.0)
    whole = 0.0
    for record in metrics.values():
        seconds = record.get("time/step")
        if isinstance(seconds, float):
            whole += seconds
            for kind in kinds:
                share = record.get(f"time/{kind}", 0.0)
                totals[kind] += seconds * share if isinstance(share, float) else 0.0
    if not whole:
        return ""
    shares = {kind: total / whole for kind, total in totals.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    return f"<section><h2>Where the time went</h2>{stacked(shares)}</section>"


def _verify(verify: Any) -> str:
    if not verify:
        return ""
    rows = "".join(
        f'<tr><td>{escape(r["name"])}</td><td><span class="badge {escape(r["verdict"])}">{escape(r["verdict"])}</span>'
        f"</td><td>{_number(r['max_difference'])}</td><td>{_number(r['noise_floor'])}</td>"
        f"<td>{escape(r['rules_out'])}</td><td>{escape(r['detail'])}</td></tr>"
        for r in verify["rungs"]
    )
    first = verify.get("first_difference")
    text = (
        f'<p class="bad">First difference: step {first["step"]}, {escape(str(first["parameter"]))}: '
        f"{escape(str(first['cause']))}</p>"
        if first
        else ""
    )
    head = "<tr><th>rung</th><th>verdict</th><th>largest difference</th><th>noise floor</th><th>rules out</th><th></th></tr>"
    title = f"Verify: {escape(str(verify['layout']))} on {verify['ranks']} ranks against one process"
    return f'<section><h2>{title}</h2>{text}<div class="wide"><table>{head}{rows}</table></div></section>'


def _checkpoints(run: RunFolder) -> str:
    steps = all_steps(run.checkpoints)
    if not steps:
        return ""
    marks = {mark: marked(run.checkpoints, mark) for mark in (LATEST, BEST)}
    rows = "".join(
        f"<tr><td>{step_of(path):,}</td><td>{_bytes(path) / 2**20:.1f} MiB</td>"
        f"<td>{' '.join(mark for mark, at in marks.items() if at == path)}</td><td>{escape(path.name)}</td></tr>"
        for path in steps
    )
    return f"<section><h2>Checkpoints</h2><table><tr><th>step</th><th>size</th><th></th><th>folder</th></tr>{rows}</table></section>"


def _sample(events: list[dict[str, Any]]) -> str:
    last = next((e for e in reversed(events) if e["event"] == "EvalDone" and e.get("extra")), None)
    if last is None:
        return ""
    texts = "".join(f"<h3>{escape(k)}</h3><pre>{escape(str(v))}</pre>" for k, v in last["extra"].items())
    return f"<section><h2>From the last evaluation</h2>{texts}</section>"


def _notes(events: list[dict[str, Any]]) -> str:
    lines = [str(e["text"]) for e in events if e["event"] == "Note"]
    lines += [f"refused {e['path']}: {e['reason']}" for e in events if e["event"] == "CheckpointRefused"]
    banner: list[str] = next((e.get("banner", []) for e in reversed(events) if e["event"] == "RunStarted"), [])
    items = "".join(f"<li>{escape(line)}</li>" for line in [*banner, *lines])
    return f"<section><h2>What was decided and noted</h2><ul>{items}</ul></section>" if items else ""


def _settings(run: RunFolder) -> dict[str, str]:
    found = {}
    path = run.path / "config.toml"
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, rest = line.partition(" = ")
        value, _, origin = rest.partition("  # ")
        found[name] = f"{value}   ({origin})"
    return found


def _table(title: str, rows: dict[str, Any]) -> str:
    if not rows:
        return ""
    body = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
    return f"<section><details><summary>{title}</summary><table>{body}</table></details></section>"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {f"{prefix}{key}": item}
    return {key: item for key, item in found.items() if key != "notes"}


def _verdict(run: RunFolder) -> Any:
    found = _json(run.path / "answer-verify.json")
    return found if isinstance(found, dict) and found.get("verdict") and "rungs" in found else None


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _last(metrics: dict[int, dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for record in metrics.values():
        merged |= record
    return merged


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value if value is not None else "–")
