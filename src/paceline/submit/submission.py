"""A training to hand in to a scheduler, and the files that hand it in."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from paceline.config.job_reference import short_name
from paceline.console.formatting import plural
from paceline.errors import UsageError

MAX_RESTARTS = 50
_HOST_PART = r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_PATH_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"({_HOST_PART}(\.{_HOST_PART})*(:\d+)?/)?{_PATH_PART}(/{_PATH_PART})*(:\w[\w.-]{{0,127}})?"
    r"(@[a-zA-Z][a-zA-Z0-9]*([-_+.][a-zA-Z][a-zA-Z0-9]*)*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
IMAGE_EXAMPLE = "registry.example/train:1"
_MAX_NAME = 40


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A training, and what it needs. `words` are the options and settings of `paceline train` after the job.

    `run` is the run folder as the nodes see it. The files are written to `folder`.
    """

    job: str
    words: tuple[str, ...]
    run: str
    folder: Path
    num_nodes: int
    ranks_per_node: int
    hours: float
    uses_gpus: bool
    image: str = ""
    own_settings: frozenset[str] = frozenset()
    """The names of the settings that the user gives, in `words` or in a file that they name."""

    @property
    def name(self) -> str:
        """The name of the job, which every scheduler takes: small letters, digits and dashes, a letter first."""
        text = re.sub(r"[^a-z0-9]+", "-", f"{short_name(self.job)}-{Path(self.run).name}".lower()).strip("-")
        text = text if text[:1].isalpha() else f"job-{text}"
        return text[:_MAX_NAME].rstrip("-")

    def train_command(self, *more: str) -> list[str]:
        """Return the command of each node. `more` are further options; settings of the user come after them."""
        per_node = ["--ranks-per-node", str(self.ranks_per_node), "--run-dir", self.run]
        return ["paceline", "train", self.job, *per_node, *more, *self.words]

    def default_setting(self, name: str, value: object) -> list[str]:
        """Return the words of a setting for `train_command`; none if the user gives it."""
        return [] if name in self.own_settings else [f"--{name}", str(value)]

    def values(self) -> dict[str, str]:
        """Return the values that all templates have in common."""
        processes = plural(self.ranks_per_node, "process") + (" each" if self.num_nodes > 1 else "")
        return {
            "job": self.job,
            "name": self.name,
            "size": f"{plural(self.num_nodes, 'node')} with {processes}",
            "num_nodes": str(self.num_nodes),
            "ranks_per_node": str(self.ranks_per_node),
        }


@dataclass(frozen=True, kw_only=True)
class SubmissionFile:
    """A file to write, and the one command that hands it in."""

    path: Path
    text: str
    command: str
    job_name: str = ""
    """The name of the job in the scheduler, if it is another one than that of the submission."""
    run: str = ""
    """The run folder as the machines see it, if it is another one than that of the submission."""
    storage: str = ""
    """Where the run folder is stored, if that outlives the machines and is not the same path here."""


def is_image_reference(text: str) -> bool:
    """Return whether a text is a reference of a container image, such as registry.example/train:1."""
    return _IMAGE.fullmatch(text) is not None


def fill_template(name: str, values: Mapping[str, str]) -> str:
    """Return the text of a template of this package with its values.

    Raises:
        KeyError: the template has a name without a value.
    """
    text = files("paceline").joinpath("submit").joinpath("templates").joinpath(name).read_text(encoding="utf-8")
    return Template(text).substitute(values)


def write_submission(file: SubmissionFile) -> None:
    """Write a file, and make it executable if it is a script.

    Raises:
        UsageError: it can't be written.
    """
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        file.path.write_text(file.text, encoding="utf-8")
        if file.path.suffix == ".sh":
            file.path.chmod(0o755)
    except OSError as error:
        raise UsageError(
            f"{file.path} can't be written: {error.strerror}.", hint="--run-dir on a writable disk"
        ) from None


def format_time(hours: float) -> str:
    """Return a time limit as Slurm takes it, such as "24:00:00"; fractions of a minute are rounded up."""
    minutes = max(1, math.ceil(hours * 60))
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
