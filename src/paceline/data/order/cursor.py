"""How far a run has come in its data: a few bytes, owned by the run and not by a rank."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """`position` samples of `epoch` are consumed; `samples` and `step` count from the run's start."""

    epoch: int = 0
    position: int = 0
    samples: int = 0
    step: int = 0

    def as_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, int]) -> "Cursor":
        """From a checkpoint."""
        return Cursor(**{name: int(value[name]) for name in ("epoch", "position", "samples", "step")})
