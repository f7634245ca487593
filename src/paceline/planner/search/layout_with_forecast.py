"""Define a layout with its settings and its forecast, as a plan passes it to a run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from typing_extensions import override

TIMED = "timed"
"""The `source` of a forecast whose seconds come from timed steps."""


@dataclass(frozen=True, kw_only=True)
class FallbackLayout:
    """A layout with its forecast. Bytes are for the rank with the highest peak, without `reserve`.

    `longer` and `fuller` are the ratios of measured to forecast step time and memory in earlier runs on this machine;
    `source` says how the forecast was made. The names are keys of the file that the workers read.
    """

    layout: str
    family: str
    ranks: int
    settings: Mapping[str, str]
    peak_bytes: int
    parts: Mapping[str, int]
    step_seconds: float
    replayed: bool = False
    longer: float = 1.0
    fuller: float = 1.0
    source: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @override
    def __str__(self) -> str:
        """Return the command-line options that select the layout."""
        return " ".join([f"--layout {self.layout}", *(f"--{name} {value}" for name, value in self.settings.items())])

    @property
    def micro_batch_size(self) -> int:
        """The microbatch size in samples."""
        return int(self.settings["train.micro_batch_size"])

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for the file that is passed to the workers."""
        return asdict(self)
