"""The data cursor: a run's position in its data, the same on all ranks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """A position in the data: `position` samples into `epoch`; `samples` and `step` count since the run's start."""

    epoch: int = 0
    position: int = 0
    samples: int = 0
    step: int = 0

    def as_json(self) -> dict[str, int]:
        """Return the cursor as a dict for a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, int]) -> "Cursor":
        """Return the cursor that a checkpoint's dict describes."""
        return Cursor(**{name: int(value[name]) for name in ("epoch", "position", "samples", "step")})
