"""The schema of a manifest: the required type of every part. A manifest with another structure can't be loaded.

The manifest's digest is not enough. It shows that the text was not damaged, but an untrusted file, or a file that was
edited together with its digest, has a valid digest too.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paceline.checkpoint.files.safetensors_io import TensorEntry
from paceline.filesystem.atomic_files import parse_json

Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class FileSchema(msgspec.Struct, kw_only=True):
    """The manifest's entry for one file. `header` is the digest of the file's header, `bytes` the file's size."""

    header: str
    bytes: Count
    tensors: list[dict[str, Any]]


class CursorSchema(msgspec.Struct, kw_only=True):
    """The run's position in its data, from `Cursor`."""

    epoch: Count
    position: Count
    samples: Count
    step: Count


class OptimizerSchema(msgspec.Struct, kw_only=True):
    """The manifest's entry for one optimizer, without its tensors."""

    kind: str
    groups: list[dict[str, Any]]


class ProgressSchema(msgspec.Struct, kw_only=True):
    """The training loop's progress besides the cursor: the trainer's `Progress`, under keys that are fixed on disk."""

    tokens: float = 0.0
    best: float | None = None  # the best value of the metric for `Job(best=)`
    best_of: str = ""  # the metric and the mode of `best`, such as `loss:min`
    waited: Count = 0  # the number of evaluations since `rule_best`
    rule_best: float | None = None  # the best value of the metric for early stopping
    rule_of: str = ""  # the metric and the mode of `rule_best`
    unjudged: bool = False  # True if an evaluation was due whose outcome is not recorded yet


class StateSchema(msgspec.Struct, kw_only=True):
    """The part of a run's state that a resume reads. Fields with a default value may be absent."""

    identity: dict[str, Any]  # what a resume compares with the current job; see `check_identity`
    cursor: CursorSchema
    feed: dict[str, Any]  # the state of the data loader
    aliases: dict[str, str]  # other names of tied tensors, each with the name under which the tensor is stored
    optimizers: list[OptimizerSchema]
    schedules: list[dict[str, Any]]
    scaler: dict[str, Any] | None = None
    extra_state: dict[str, Any] = {}
    extra: ProgressSchema = msgspec.field(default_factory=ProgressSchema)
    grid: dict[str, int | None] = {}  # of exact mode: the exponent of each parameter's fixed-point numbers
    settings: dict[str, str] | None = None
    sites: list[dict[str, Any]] = []


class ManifestSchema(msgspec.Struct, kw_only=True):
    """The body of a manifest."""

    format: str
    step: Count
    state: dict[str, Any]
    files: dict[str, Any]


def parse_manifest(text: str) -> ManifestSchema:
    """Return the body of a manifest.

    Raises:
        ValueError: the text does not match the schema.
    """
    return msgspec.convert(parse_json(text), ManifestSchema)


def parse_files(file_entries: Mapping[str, Any]) -> dict[str, tuple[FileSchema, list[TensorEntry]]]:
    """Return a manifest's entries for each file and its tensors.

    Raises:
        ValueError: an entry does not match the schema, or sizes are inconsistent.
    """
    files = msgspec.convert(file_entries, dict[str, FileSchema])
    return {name: (file, [TensorEntry.from_json(entry) for entry in file.tensors]) for name, file in files.items()}


def check_state(state: Mapping[str, Any]) -> None:
    """Raise an error for a state that no run can resume from.

    Raises:
        ValueError: a part has the wrong type; the message names it.
    """
    msgspec.convert(state, StateSchema)
