"""Define the task that a command passes, as plain JSON, to the worker processes that it starts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.config.job_reference import short_name, split_jobref


@dataclass(frozen=True, kw_only=True)
class PreviousFailure:
    """The failure of the attempt before, after which the run restarted by itself.

    `reason` is one line. `failed_step` is the step that the failure interrupted; 0 if it came before the first one.
    `monotonic_ns` is its time on the clock of the machine.
    """

    reason: str
    failed_step: int
    monotonic_ns: int
    copies: Mapping[str, Any] | None = None
    """The copies of a weight that differed between ranks (`DifferingCopies`), if that was the failure."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A verb on one job. Paths are text; `settings` are requested values by dotted name, `origins` their sources."""

    verb: str
    job: str
    run: str = ""
    layout: str = "single"
    update: str = "sync"
    typed_update: str = ""
    """The update rule as the command named it, perhaps without options that have their defaults."""
    compress: str = "none"
    ranks: int = 1
    requested_ranks: int = 0
    """The number of ranks that the command asked for, if the run may continue with fewer; otherwise 0."""
    nodes: str = ""
    """`--nodes` of the command, if Paceline starts the ranks on several nodes itself."""
    device: str = "cpu"
    attempt: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    resume: str | None = None
    allow: tuple[str, ...] = ()
    faults: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    restart: PreviousFailure | None = None
    """The failure of the attempt before, if the run restarted by itself."""
    memory_folder: str = ""
    """The folder of this command's checkpoints in memory; empty if it has none."""
    peer_plan: Mapping[str, Any] | None = None
    """The nodes that hold checkpoints in memory for each other (`PeerPlan` as JSON); None on a single machine."""
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
            resume=self.resume if self.resume in (None, "newest") or "://" in self.resume else absolute(self.resume),
            options=options,
        )

    @property
    def request(self) -> dict[str, Any]:
        """Return what the command asks for, as JSON: a requeued command that asks for the same continues its run."""
        settings = {name: str(value) for name, value in self.settings.items()}
        return {"layout": self.layout, "update": self.update, "compress": self.compress, "settings": settings}

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
        restart = None if value.get("restart") is None else PreviousFailure(**value["restart"])
        return Task(**{**value, "allow": tuple(value.get("allow", ())), "restart": restart})
