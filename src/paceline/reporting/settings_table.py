"""The settings of a run: the changed ones with their origins, then those at their default."""

from html import escape
from pathlib import Path

from paceline.config.merge_settings import default_value, known_settings
from paceline.config.secret_settings import mask_value
from paceline.filesystem.atomic_files import read_regular
from paceline.reporting.run_history import json_or_none
from paceline.run_folder.run_folder import RunFolder

_OPTIONS = ("job", "layout", "update", "compress", "ranks", "nodes", "device", "faults")  # keys of task.json


def read_settings(run: RunFolder) -> dict[str, tuple[str, str]]:
    """Return the (value, origin) of each setting by its dotted name; values that look like secrets are masked."""
    settings: dict[str, tuple[str, str]] = {}
    task = json_or_none(run.path / "task.json")
    for name in _OPTIONS:
        if isinstance(task, dict) and task.get(name) not in (None, "", "none"):
            settings[name] = (str(task[name]), "")
    job_settings = json_or_none(run.path / "job.json")
    for name, value in job_settings.items() if isinstance(job_settings, dict) else ():
        settings[name] = (mask_value(name, value), "the job")
    for line in _read_lines(run.path / "config.toml"):
        name, equals, rest = line.partition(" = ")
        value, _, origin = rest.rpartition("  # ")
        if equals:
            settings[name] = (mask_value(name, value), origin)
    return settings


def _read_lines(path: Path) -> list[str]:
    try:
        return read_regular(path).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return []


def show_settings(run: RunFolder) -> str:
    """Return the tables of the changed settings and of the settings at their default as HTML."""
    settings = read_settings(run)
    if not settings:
        return ""
    rows = "".join(
        _row(name, value, origin) for name, (value, origin) in settings.items() if not _is_default(name, value)
    )
    defaults = {name: str(default_value(name)) for name in known_settings() if name not in settings}
    defaults |= {name: value for name, (value, _) in settings.items() if _is_default(name, value)}
    default_rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(defaults[name])}</td></tr>" for name in sorted(defaults)
    )
    head = "<tr><th>setting</th><th>value</th><th>default</th><th>set by</th></tr>"
    return (
        f'<section><h2>Settings</h2><div class="wide"><table>{head}{rows}</table></div>'
        f"<details><summary>{len(defaults)} settings at their default</summary><table>{default_rows}</table></details></section>"
    )


def _row(name: str, value: str, origin: str) -> str:
    default = str(default_value(name)) if name in known_settings() else ""
    cells = "".join(f"<td>{escape(text)}</td>" for text in (name, value.strip('"'), default, origin))
    return f"<tr>{cells}</tr>"


def _is_default(name: str, value: str) -> bool:
    return name in known_settings() and str(default_value(name)).lower() == value.strip('"').lower()
