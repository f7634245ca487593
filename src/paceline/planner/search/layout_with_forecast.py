"""Define a layout with its settings and its forecast, as a plan passes it to a run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from typing_extensions import override

TIMED = "timed"
"""The `source` of a forecast whose seconds were measured."""


@dataclass(frozen=True, kw_only=True)
class LayoutForecast:
    """A layout with its forecast. The field names are keys of the file that the workers read.

    Bytes are those of the fullest rank, without the reserve of a process.
    """

    layout: str
    """The value to type after `--layout`."""
    family: str
    ranks: int
    settings: Mapping[str, str]
    """The settings to type besides the layout, by dotted name."""
    peak_bytes: int
    parts: Mapping[str, int]
    """The bytes of the peak by purpose, without those that are 0."""
    step_seconds: float
    replayed: bool = False
    """True if a replay counted the bytes."""
    longer: float = 1.0
    """The ratio of measured to forecast step time, by which `step_seconds` is already multiplied.

    It comes from earlier runs on this machine and, if the plan timed steps, also from these.
    """
    fuller: float = 1.0
    """The ratio of measured to forecast memory in earlier runs on this machine; 1 if `replayed`."""
    source: str = ""
    """How the forecast was made."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The seconds of the step by purpose, without those that are 0."""

    @override
    def __str__(self) -> str:
        """Return the options to type."""
        return " ".join([f"--layout {self.layout}", *(f"--{name} {value}" for name, value in self.settings.items())])

    @property
    def micro_batch_size(self) -> int:
        """The microbatch size in samples."""
        return int(self.settings["train.micro_batch_size"])

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for the file that the workers read."""
        return asdict(self)
