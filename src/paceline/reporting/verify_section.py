"""The section of a run's page about `verify`: a verdict on the same job, settings, layout and ranks."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from paceline.config.merge_settings import default_value, known_settings
from paceline.config.secret_settings import mask_value
from paceline.filesystem.atomic_files import read_json
from paceline.reporting.run_history import json_or_none
from paceline.run_folder.run_folder import RunFolder

_IGNORED_PREFIXES = ("log.", "watch.", "checkpoint.", "eval.", "run_dir", "train.threads", "train.timeout_seconds")
_MODULE, _PATH_KEY = "module ", "place"  # the prefix of conditions about modules; the key for the path of the answer
_MAX_BYTES = 4 << 20
_IGNORED_SETTINGS = (
    "train.steps",
    "train.epochs",
    "train.samples",
    "train.tokens",
    "train.check_every",
    "data.workers",
)


def find_verdict(run: RunFolder) -> tuple[dict[str, Any] | None, str]:
    """Return a verdict on this training from this folder or a nearby one, or the reason why there is none.

    A verdict in the run's own folder comes first. Then come the nearby folders in descending order of their names,
    which by default begin with the time. A verdict in a nearby folder is used only if the folder has the same owner as
    the run. The returned verdict is the content of its answer file.
    """
    run_conditions, late_modules, run_answer = _conditions_of_run(run), _late_modules(run), run.answer("verify")
    nearby_answers = [path for folders in ("*", "*/*") for path in run.path.parent.glob(f"{folders}/{run_answer.name}")]
    nearby_answers = [path for path in nearby_answers if path.parent != run.path and _has_same_owner(path, run)]
    reason = ""
    for path in [run_answer, *sorted(nearby_answers, key=lambda p: p.parent.name, reverse=True)]:
        answer = _read_answer(path)
        if answer is None:
            continue
        answer_conditions = _conditions_of_answer(answer, relevant={**run_conditions, **late_modules})
        differences = condition_differences(
            {
                **run_conditions,
                **{name: condition for name, condition in late_modules.items() if name in answer_conditions},
            },
            answer_conditions,
        )
        if not differences:
            return {**answer, _PATH_KEY: str(path)}, ""
        if path.parent == run.path:
            reason = (
                f"This folder has a verdict of verify, but it is about a different training: {', '.join(differences)}."
            )
        elif not reason and all(name.startswith(_MODULE) for name in differences):
            reason = f"Verified in {path.parent} with different code than this run's: {', '.join(differences)}."
    return None, reason


def _read_answer(path: Path) -> dict[str, Any] | None:
    try:
        answer = read_json(path, max_bytes=_MAX_BYTES)
    except (OSError, ValueError):
        return None
    is_answer = isinstance(answer, dict) and answer.get("verdict") and isinstance(answer.get("rungs"), list)
    return answer if is_answer else None


def _has_same_owner(path: Path, run: RunFolder) -> bool:
    """Return True if the answer and its folder belong to the owner of the run."""
    try:
        owner = run.path.stat().st_uid
        return path.lstat().st_uid == owner and path.stat().st_uid == owner and path.parent.stat().st_uid == owner
    except OSError:
        return False


def condition_differences(run_conditions: Mapping[str, str], answer_conditions: Mapping[str, str]) -> list[str]:
    """Return a text such as `torch (2.4 here, 2.3 there)` for each condition that differs; "here" is the run."""
    names = sorted(set(run_conditions) | set(answer_conditions))
    return [
        f"{n} ({run_conditions.get(n, 'unset')} here, {answer_conditions.get(n, 'unset')} there)"
        for n in names
        if run_conditions.get(n) != answer_conditions.get(n)
    ]


def _conditions_of_run(run: RunFolder) -> dict[str, str]:
    task, env = json_or_none(run.path / "task.json"), json_or_none(run.path / "env.json")
    task = task if isinstance(task, dict) else {}
    job = env.get("job") if isinstance(env, dict) else None
    job = job if isinstance(job, dict) else {}
    return _conditions(task, {"device": task.get("device"), **job}, task.get("settings"))


def _late_modules(run: RunFolder) -> dict[str, str]:
    """Return the digests of the modules that the run loaded after its first step."""
    env = json_or_none(run.path / "env.json")
    job = env.get("job") if isinstance(env, dict) else None
    modules = job.get("late_modules") if isinstance(job, dict) else None
    return (
        {f"{_MODULE}{name}": str(digest)[:12] for name, digest in modules.items()} if isinstance(modules, dict) else {}
    )


def _conditions_of_answer(answer: Mapping[str, Any], *, relevant: Mapping[str, str]) -> dict[str, str]:
    """Return the conditions of an answer, without modules that only `verify` loaded."""
    about = answer.get("about")
    about = about if isinstance(about, dict) else {}
    conditions = _conditions(answer, about, about.get("settings"))
    return {
        name: condition for name, condition in conditions.items() if name in relevant or not name.startswith(_MODULE)
    }


def _conditions(placement: Mapping[str, Any], job: Mapping[str, Any], settings: Any) -> dict[str, str]:
    """Return, by name, what must be equal in a run and in a verdict: layout, code, packages and settings."""
    conditions = {name: str(placement.get(name)) for name in ("layout", "update", "ranks")}
    conditions["compress"] = str(placement.get("compress", "none"))
    for name, key in (("job file", "digest"), ("torch", "torch_build"), ("device", "device")):
        conditions[name] = str(job.get(key) or "unknown")[: 12 if key == "digest" else None]
    for prefix, key in ((_MODULE, "modules"), ("", "packages")):
        digests = job.get(key)
        conditions |= (
            {f"{prefix}{name}": str(value)[:12] for name, value in digests.items()} if isinstance(digests, dict) else {}
        )
    conditions |= {} if isinstance(job.get("modules"), dict) else {"loaded code": "unknown"}
    for name, value in (settings if isinstance(settings, dict) else {}).items():
        ignored = name.startswith(_IGNORED_PREFIXES) or name in _IGNORED_SETTINGS
        if not ignored and not _is_default(name, value):
            conditions[name] = mask_value(name, value)
    return conditions


def _is_default(name: str, value: Any) -> bool:
    return name in known_settings() and str(default_value(name)).lower() == str(value).lower()


def show_verdict(answer: dict[str, Any] | None, reason: str) -> str:
    """Return the page's section about verify."""
    if answer is None:
        return f'<section><h2>Verify</h2><p class="soft">{escape(reason)}</p></section>' if reason else ""
    rows = "".join(_rung_row(rung) for rung in answer["rungs"] if isinstance(rung, dict))
    first_difference = answer.get("first_difference")
    text = ""
    if isinstance(first_difference, dict):
        location = (
            f"step {first_difference.get('step')}, {first_difference.get('parameter')}: {first_difference.get('cause')}"
        )
        text = f'<p class="bad">First difference: {escape(location)}</p>'
    head = "<tr><th>rung</th><th>verdict</th><th>largest difference</th><th>noise floor</th><th>rules out</th><th></th></tr>"
    title = (
        f"Verify: {escape(str(answer.get('layout')))} on {escape(str(answer.get('ranks')))} ranks against one process"
    )
    location = f'<p class="soft">{escape(str(answer.get(_PATH_KEY, "")))}</p>'
    table = f'<div class="wide"><table>{head}{rows}</table></div>'
    return f"<section><h2>{title}</h2>{location}{text}{table}{_show_limits(answer)}</section>"


def _show_limits(answer: Mapping[str, Any]) -> str:
    """Return what a rung could not check, and the list of what no compared step exercised."""
    left_out = [rung["left_out"] for rung in answer["rungs"] if isinstance(rung, dict) and rung.get("left_out")]
    html = "".join(f"<p>Not covered: {escape(str(text))}.</p>" for text in dict.fromkeys(map(str, left_out)))
    gaps = read_gaps(answer)
    if not gaps:
        return html
    items = "".join(f"<li>{escape(gap)}</li>" for gap in gaps)
    return f"{html}<p>Not exercised, so the verdict says nothing about it:</p><ul>{items}</ul>"


def read_gaps(answer: Mapping[str, Any]) -> list[str]:
    """Return what no compared step exercised; nothing if the answer does not say, as that of an older version."""
    gaps = answer.get("not_exercised")
    return [str(gap) for gap in gaps] if isinstance(gaps, list) else []


def _rung_row(rung: Mapping[str, Any]) -> str:
    verdict = escape(str(rung.get("verdict")))
    numbers = "".join(f"<td>{format_number(rung.get(key))}</td>" for key in ("max_difference", "noise_floor"))
    words = "".join(f"<td>{escape(str(rung.get(key, '')))}</td>" for key in ("rules_out", "detail"))
    return f'<tr><td>{escape(str(rung.get("name")))}</td><td><span class="badge {verdict}">{verdict}</span></td>{numbers}{words}</tr>'


def format_number(value: Any) -> str:
    """Return a number with four significant digits, and any other value as HTML text; `–` for None."""
    return f"{value:.4g}" if isinstance(value, int | float) else escape(str(value if value is not None else "–"))
