"""The `config` verb: prints every setting of a job, its value, and where the value comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.commands.command_table import ConfigOptions, VerbOutput
from paceline.config.job_reference import JobRef, job_defaults, parse_jobref
from paceline.config.merge_settings import (
    JOB,
    JOB_SETTINGS,
    RequestedSettings,
    default_value,
    known_settings,
    merge,
    read_requested_settings,
)
from paceline.config.secret_settings import HIDDEN, holds_secret
from paceline.errors import JobError, PacelineError, job_exit_error, user_line
from paceline.plugins import resolve


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting: its value (dots for a secret) and where the value came from."""

    name: str
    value: Any
    origin: str


def config(job: str, *, file: Path | None = None, overrides: Sequence[str] = ()) -> list[Setting]:
    """Return every setting of `job`. The job's code is run, because it may set settings of its own.

    Raises:
        JobError: the job can't be loaded.
        UsageError, Problems: a setting has an invalid value.
    """
    ref = parse_jobref(job)
    requested = read_requested_settings(file=file, overrides=overrides)
    requested = requested.layered_over(_job_settings(ref, requested), origin=JOB, where=JOB_SETTINGS)
    merge(requested)
    rows = [
        Setting(
            name=name,
            value=requested.values.get(name, default_value(name)),
            origin=requested.origins.get(name, "default"),
        )
        for name in known_settings()
    ]
    for name, source in (job_defaults(ref) or {}).items():
        dotted = f"job.{name}"
        value = requested.values.get(dotted, source)
        rows.append(
            Setting(
                name=dotted,
                value=HIDDEN if value and holds_secret([dotted]) else value,
                origin=requested.origins.get(dotted, f"{ref.short}.py"),
            )
        )
    return rows


def _job_settings(ref: JobRef, requested: RequestedSettings) -> dict[str, Any]:
    """Load the job with the requested parameters, and return the settings that it sets."""
    params = {name[4:]: value for name, value in requested.values.items() if name.startswith("job.")}
    load_job = resolve("paceline.job:load_job")
    settings_of_job = resolve("paceline.trainer.setup.build_training_setup:job_settings")
    try:
        settings: dict[str, Any] = settings_of_job(load_job(ref, params=params))
    except PacelineError:
        raise
    except SystemExit as error:
        raise job_exit_error(error) from error
    except Exception as error:
        raise JobError(
            f"{ref} can't be loaded: {type(error).__name__}: {error}", where=str(user_line(error) or ref)
        ) from error
    return settings


def run_verb(options: ConfigOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    rows = config(options.job, file=options.config, overrides=settings)
    width = max(len(row.name) for row in rows)
    return 0, rows, "\n".join(f"{row.name:<{width}}  {row.value!s:<24} {row.origin}" for row in rows)
