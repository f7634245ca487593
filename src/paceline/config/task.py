"""Define the task that a command passes, as plain JSON, to the worker processes that it starts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.job_reference import short_name, split_jobref


@dataclass(frozen=True, kw_only=True)
class Task:
    """A verb on one job. Paths are text; `settings` are requested values by dotted name, `origins` their sources."""

    verb: str
    job: str
    run: str = ""
    layout: str = "single"
    update: str = "sync"
    compress: str = "none"
    ranks: int = 1
    device: str = "cpu"
    attempt: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    resume: str | None = None
    allow: tuple[str, ...] = ()
    faults: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    restart: dict[str, Any] | None = None
    """What ended the attempt before, if the run restarted by itself: `reason`, `failed_step` and `monotonic_ns`."""
    memory_folder: str = ""
    """The folder of this command's checkpoints in memory; empty if it has none."""
    job_handle: int | None = None
    """The descriptor of an open file with a job that is a Python object; valid only in this run's processes."""

    def with_absolute_paths(self, folder: Path) -> "Task":
        """Return the task with paths that are valid in any working folder; relative ones are resolved from `folder`."""

        def absolute(text: str) -> str:
            return str(folder / text) if text else text

        path, colon, name = split_jobref(self.job)
        options = {**self.options}
        if "checkpoint" in options:
            options["checkpoint"] = absolute(str(options["checkpoint"]))
        return replace(
            self,
            run=absolute(self.run),
            job=absolute(path) + colon + name if path.endswith(".py") else self.job,
            resume=self.resume if self.resume in (None, "newest") else absolute(str(self.resume)),
            options=options,
        )

    @property
    def short_job(self) -> str:
        """Return the job's short name, after which its run folders are named."""
        return short_name(self.job)

    def as_json(self) -> dict[str, Any]:
        """Return the task as a dict for the file that the workers read."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Task":
        """Return the task from the dict that `as_json` returned."""
        return Task(**{**value, "allow": tuple(value.get("allow", ()))})
