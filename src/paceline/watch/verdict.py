"""Verify's answer, shown beside a run only where it was about the same job, settings, layout and ranks."""

from collections.abc import Mapping
from html import escape
from typing import Any

from paceline.spec.read import default_of, known_settings
from paceline.store.runs import RunFolder
from paceline.watch.history import json_or_none

ANSWER = "answer-verify.json"
_NOT_THE_TRAINING = ("log.", "watch.", "checkpoint.", "eval.", "run_dir", "train.threads", "train.timeout_seconds")
_LENGTH = ("train.steps", "train.epochs", "train.samples", "train.tokens", "train.check_every", "data.workers")


def find_verdict(run: RunFolder) -> tuple[dict[str, Any] | None, str]:
    """The newest answer about this very training, from this folder or one near it; else why none is shown."""
    own = _facts_of_run(run)
    others = [path for where in ("*", "*/*") for path in run.path.parent.glob(f"{where}/{ANSWER}")]
    others = [path for path in others if path.parent != run.path]
    reason = ""
    for path in [run.path / ANSWER, *sorted(others, key=lambda p: p.parent.name, reverse=True)]:
        answer = json_or_none(path)
        if not isinstance(answer, dict) or not answer.get("verdict") or not isinstance(answer.get("rungs"), list):
            continue
        unlike = differences(own, _facts_of_answer(answer))
        if not unlike:
            return answer, ""
        if path.parent == run.path:
            reason = f"An answer of verify lies in this folder, but it is about another training: {', '.join(unlike)}."
    return None, reason


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """`name (here, there)` for what is not the same."""
    names = sorted(set(one) | set(other))
    return [
        f"{n} ({one.get(n, 'unset')} here, {other.get(n, 'unset')} there)" for n in names if one.get(n) != other.get(n)
    ]


def _facts_of_run(run: RunFolder) -> dict[str, str]:
    task, env = json_or_none(run.path / "task.json"), json_or_none(run.path / "env.json")
    task = task if isinstance(task, dict) else {}
    job = env.get("job") if isinstance(env, dict) else None
    return _facts(task, job if isinstance(job, dict) else {}, task.get("settings"))


def _facts_of_answer(answer: Mapping[str, Any]) -> dict[str, str]:
    about = answer.get("about")
    about = about if isinstance(about, dict) else {}
    return _facts(answer, about, about.get("settings"))


def _facts(placed: Mapping[str, Any], job: Mapping[str, Any], settings: Any) -> dict[str, str]:
    found = {name: str(placed.get(name)) for name in ("layout", "update", "ranks")}
    found["compress"] = str(placed.get("compress", "none"))
    digest = job.get("digest")
    found["job file"] = str(digest)[:12] if digest else "unknown"
    for name, value in (settings if isinstance(settings, dict) else {}).items():
        ignored = name.startswith(_NOT_THE_TRAINING) or name in _LENGTH
        if not ignored and not _is_default(name, value):
            found[name] = str(value)
    return found


def _is_default(name: str, value: Any) -> bool:
    return name in known_settings() and str(default_of(name)).lower() == str(value).lower()


def show_verdict(answer: dict[str, Any] | None, reason: str) -> str:
    """The section about verify."""
    if answer is None:
        return f'<section><h2>Verify</h2><p class="soft">{escape(reason)}</p></section>' if reason else ""
    rows = "".join(_rung(rung) for rung in answer["rungs"] if isinstance(rung, dict))
    first = answer.get("first_difference")
    text = ""
    if isinstance(first, dict):
        place = f"step {first.get('step')}, {first.get('parameter')}: {first.get('cause')}"
        text = f'<p class="bad">First difference: {escape(place)}</p>'
    head = "<tr><th>rung</th><th>verdict</th><th>largest difference</th><th>noise floor</th><th>rules out</th><th></th></tr>"
    title = (
        f"Verify: {escape(str(answer.get('layout')))} on {escape(str(answer.get('ranks')))} ranks against one process"
    )
    return f'<section><h2>{title}</h2>{text}<div class="wide"><table>{head}{rows}</table></div></section>'


def _rung(rung: Mapping[str, Any]) -> str:
    word = escape(str(rung.get("verdict")))
    numbers = "".join(f"<td>{number(rung.get(key))}</td>" for key in ("max_difference", "noise_floor"))
    words = "".join(f"<td>{escape(str(rung.get(key, '')))}</td>" for key in ("rules_out", "detail"))
    return f'<tr><td>{escape(str(rung.get("name")))}</td><td><span class="badge {word}">{word}</span></td>{numbers}{words}</tr>'


def number(value: Any) -> str:
    """A number for people."""
    return f"{value:.4g}" if isinstance(value, int | float) else escape(str(value if value is not None else "–"))
