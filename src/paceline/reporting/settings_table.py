"""The settings of a run: first those that were set, with their origins, then the defaults."""

from html import escape
from pathlib import Path

from paceline.config.loading import default_of, known_settings
from paceline.config.secret_settings import mask_value
from paceline.filesystem.atomic_files import read_regular
from paceline.reporting.run_history import json_or_none
from paceline.run_folder.run_folder import RunFolder

_OPTIONS = ("job", "layout", "update", "compress", "ranks", "device", "faults")


def settings_of(run: RunFolder) -> dict[str, tuple[str, str]]:
    """Return each dotted name's (value, origin) as given; values that look like secrets are hidden."""
    found: dict[str, tuple[str, str]] = {}
    task = json_or_none(run.path / "task.json")
    for name in _OPTIONS:
        if isinstance(task, dict) and task.get(name) not in (None, "", "none"):
            found[name] = (str(task[name]), "")
    chosen = json_or_none(run.path / "job.json")
    for name, value in chosen.items() if isinstance(chosen, dict) else ():
        found[name] = (mask_value(name, value), "the job")
    for line in _lines_of(run.path / "config.toml"):
        name, equals, rest = line.partition(" = ")
        value, _, origin = rest.rpartition("  # ")
        if equals:
            found[name] = (mask_value(name, value), origin)
    return found


def _lines_of(path: Path) -> list[str]:
    try:
        return read_regular(path).decode(errors="replace").splitlines()
    except (OSError, ValueError):
        return []


def show_settings(run: RunFolder) -> str:
    """Return both tables as HTML."""
    found = settings_of(run)
    if not found:
        return ""
    rows = "".join(_row(name, value, origin) for name, (value, origin) in found.items() if not _is_default(name, value))
    left = {name: str(default_of(name)) for name in known_settings() if name not in found}
    left |= {name: value for name, (value, _) in found.items() if _is_default(name, value)}
    rest = "".join(f"<tr><td>{escape(name)}</td><td>{escape(left[name])}</td></tr>" for name in sorted(left))
    head = "<tr><th>setting</th><th>value</th><th>default</th><th>set by</th></tr>"
    return (
        f'<section><h2>Settings</h2><div class="wide"><table>{head}{rows}</table></div>'
        f"<details><summary>{len(left)} settings at their default</summary><table>{rest}</table></details></section>"
    )


def _row(name: str, value: str, origin: str) -> str:
    default = str(default_of(name)) if name in known_settings() else ""
    cells = "".join(f"<td>{escape(text)}</td>" for text in (name, value.strip('"'), default, origin))
    return f"<tr>{cells}</tr>"


def _is_default(name: str, value: str) -> bool:
    return name in known_settings() and str(default_of(name)).lower() == value.strip('"').lower()
