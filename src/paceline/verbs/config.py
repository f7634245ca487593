"""`config`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.spec.jobref import job_defaults, parse_jobref
from paceline.spec.read import default_of, known_settings, read_asked


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, its value and where that came from."""

    name: str
    value: Any
    origin: str


def config(job: str, *, file: Path | None = None, overrides: Sequence[str] = ()) -> list[Setting]:
    """Every setting of `job`, as far as it is known without running the job's own code."""
    ref = parse_jobref(job)
    asked = read_asked(file=file, overrides=overrides)
    found = [
        Setting(name=name, value=asked.values.get(name, default_of(name)), origin=asked.origins.get(name, "default"))
        for name in known_settings()
    ]
    for name, source in (job_defaults(ref) or {}).items():
        dotted = f"job.{name}"
        found.append(
            Setting(
                name=dotted,
                value=asked.values.get(dotted, source),
                origin=asked.origins.get(dotted, f"{ref.short}.py"),
            )
        )
    return found
