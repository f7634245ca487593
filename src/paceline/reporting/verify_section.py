"""The verdict of `verify`, shown with a run only if job, settings, layout and ranks are the same."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from paceline.config.loading import default_of, known_settings
from paceline.config.secret_settings import mask_value
from paceline.filesystem.atomic_files import read_json
from paceline.reporting.run_history import json_or_none
from paceline.run_folder.run_folder import RunFolder

_NOT_THE_TRAINING = ("log.", "watch.", "checkpoint.", "eval.", "run_dir", "train.threads", "train.timeout_seconds")
_MODULE, _PLACE = "module ", "place"
_MOST_BYTES = 4 << 20
_LENGTH = ("train.steps", "train.epochs", "train.samples", "train.tokens", "train.check_every", "data.workers")


def find_verdict(run: RunFolder) -> tuple[dict[str, Any] | None, str]:
    """Return the newest verdict on this very training, from this folder or one near it, or why none is shown.

    A nearby folder may be anybody's: only a verdict of the run's owner counts, and the page names its place.
    """
    own, late, own_answer = _facts_of_run(run), _late_modules(run), run.answer("verify")
    others = [path for where in ("*", "*/*") for path in run.path.parent.glob(f"{where}/{own_answer.name}")]
    others = [path for path in others if path.parent != run.path and _is_owners(path, run)]
    reason = ""
    for path in [own_answer, *sorted(others, key=lambda p: p.parent.name, reverse=True)]:
        answer = _answer_of(path)
        if answer is None:
            continue
        theirs = _facts_of_answer(answer, asked={**own, **late})
        unlike = condition_differences({**own, **{name: fact for name, fact in late.items() if name in theirs}}, theirs)
        if not unlike:
            return {**answer, _PLACE: str(path)}, ""
        if path.parent == run.path:
            reason = f"This folder has a verdict of verify, but it is about a different training: {', '.join(unlike)}."
        elif not reason and all(name.startswith(_MODULE) for name in unlike):
            reason = f"Verified in {path.parent} with different code than this run's: {', '.join(unlike)}."
    return None, reason


def _answer_of(path: Path) -> dict[str, Any] | None:
    try:
        answer = read_json(path, max_bytes=_MOST_BYTES)
    except (OSError, ValueError):
        return None
    is_one = isinstance(answer, dict) and answer.get("verdict") and isinstance(answer.get("rungs"), list)
    return answer if is_one else None


def _is_owners(path: Path, run: RunFolder) -> bool:
    """Return whether the answer and its folder belong to the owner of the run."""
    try:
        owner = run.path.stat().st_uid
        return path.lstat().st_uid == owner and path.stat().st_uid == owner and path.parent.stat().st_uid == owner
    except OSError:
        return False


def condition_differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return `name (here, there)` for each value that differs."""
    names = sorted(set(one) | set(other))
    return [
        f"{n} ({one.get(n, 'unset')} here, {other.get(n, 'unset')} there)" for n in names if one.get(n) != other.get(n)
    ]


def _facts_of_run(run: RunFolder) -> dict[str, str]:
    task, env = json_or_none(run.path / "task.json"), json_or_none(run.path / "env.json")
    task = task if isinstance(task, dict) else {}
    job = env.get("job") if isinstance(env, dict) else None
    job = job if isinstance(job, dict) else {}
    return _facts(task, {"device": task.get("device"), **job}, task.get("settings"))


def _late_modules(run: RunFolder) -> dict[str, str]:
    """Return the code that the run loaded after its first step, limited to modules that `verify` loaded too."""
    env = json_or_none(run.path / "env.json")
    job = env.get("job") if isinstance(env, dict) else None
    late = job.get("late_modules") if isinstance(job, dict) else None
    return {f"{_MODULE}{name}": str(digest)[:12] for name, digest in late.items()} if isinstance(late, dict) else {}


def _facts_of_answer(answer: Mapping[str, Any], *, asked: Mapping[str, str]) -> dict[str, str]:
    """Return the facts of an answer. A module that only `verify` has loaded is not part of the run's code."""
    about = answer.get("about")
    about = about if isinstance(about, dict) else {}
    found = _facts(answer, about, about.get("settings"))
    return {name: fact for name, fact in found.items() if name in asked or not name.startswith(_MODULE)}


def _facts(placed: Mapping[str, Any], job: Mapping[str, Any], settings: Any) -> dict[str, str]:
    found = {name: str(placed.get(name)) for name in ("layout", "update", "ranks")}
    found["compress"] = str(placed.get("compress", "none"))
    for name, key in (("job file", "digest"), ("torch", "torch_build"), ("device", "device")):
        found[name] = str(job.get(key) or "unknown")[: 12 if key == "digest" else None]
    for prefix, key in ((_MODULE, "modules"), ("", "packages")):
        told = job.get(key)
        found |= {f"{prefix}{name}": str(value)[:12] for name, value in told.items()} if isinstance(told, dict) else {}
    found |= {} if isinstance(job.get("modules"), dict) else {"loaded code": "unknown"}
    for name, value in (settings if isinstance(settings, dict) else {}).items():
        ignored = name.startswith(_NOT_THE_TRAINING) or name in _LENGTH
        if not ignored and not _is_default(name, value):
            found[name] = mask_value(name, value)
    return found


def _is_default(name: str, value: Any) -> bool:
    return name in known_settings() and str(default_of(name)).lower() == str(value).lower()


def show_verdict(answer: dict[str, Any] | None, reason: str) -> str:
    """Return the page's section about verify."""
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
    place = f'<p class="soft">{escape(str(answer.get(_PLACE, "")))}</p>'
    return f'<section><h2>{title}</h2>{place}{text}<div class="wide"><table>{head}{rows}</table></div></section>'


def _rung(rung: Mapping[str, Any]) -> str:
    word = escape(str(rung.get("verdict")))
    numbers = "".join(f"<td>{number(rung.get(key))}</td>" for key in ("max_difference", "noise_floor"))
    words = "".join(f"<td>{escape(str(rung.get(key, '')))}</td>" for key in ("rules_out", "detail"))
    return f'<tr><td>{escape(str(rung.get("name")))}</td><td><span class="badge {word}">{word}</span></td>{numbers}{words}</tr>'


def number(value: Any) -> str:
    """Format a number for people."""
    return f"{value:.4g}" if isinstance(value, int | float) else escape(str(value if value is not None else "–"))
