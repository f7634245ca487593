"""A layout with what goes with it and its forecast, as it crosses from a plan to a run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TIMED = "timed"
"""The source of a forecast whose seconds are those of steps that were timed."""


@dataclass(frozen=True, kw_only=True)
class FallbackLayout:
    """One layout. Bytes are of the fullest rank, without what a process needs before it has a model.

    `longer` and `fuller` are what the forecast was corrected by, from runs here before; `source` is what made it.
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

    def __str__(self) -> str:
        """What to type."""
        return " ".join([f"--layout {self.layout}", *(f"--{name} {value}" for name, value in self.settings.items())])

    @property
    def micro_batch_size(self) -> int:
        """In samples."""
        return int(self.settings["train.micro_batch_size"])

    def as_json(self) -> dict[str, Any]:
        """For the file that crosses to the workers."""
        return asdict(self)
