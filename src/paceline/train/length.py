"""How long a run is, and what the loop counts on the way."""

import math
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from paceline.order.cursor import Cursor


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long to train; the first limit that is reached ends the run."""

    steps: int | None = None
    samples: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    epoch_samples: int | None = None

    def total_steps(self, *, batch: int, drop_last: bool) -> int | None:
        """The number of steps, where it is known before."""
        if self.steps is not None:
            return self.steps
        if self.samples is not None and self.epoch_samples is None:
            return math.ceil(self.samples / batch)
        if self.epoch_samples is None or (self.epochs is None and self.samples is None):
            return None
        per_epoch = self.epoch_samples // batch if drop_last else math.ceil(self.epoch_samples / batch)
        epochs = self.epochs if self.epochs is not None else (self.samples or 0) / self.epoch_samples
        return max(1, math.ceil(per_epoch * epochs))

    def reached(self, cursor: Cursor, *, tokens: float, total: int | None) -> bool:
        """Whether the run is over at this cursor."""
        if total is not None and cursor.step >= total:
            return True
        if self.tokens is not None and tokens >= self.tokens:
            return True
        if self.samples is not None and self.epoch_samples is None and cursor.samples >= self.samples:
            return True
        return total is None and self.epochs is not None and cursor.epoch >= self.epochs


@dataclass
class Progress:
    """What the loop remembers beside the cursor; saved with it. `unjudged`: a stop came before a due evaluation."""

    tokens: float = 0.0
    best: float | None = None
    waited: int = 0
    unjudged: bool = False
    saves_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"tokens": self.tokens, "best": self.best, "waited": self.waited, "unjudged": self.unjudged}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """From a checkpoint."""
        return cls(
            tokens=value.get("tokens", 0.0),
            best=value.get("best"),
            waited=value.get("waited", 0),
            unjudged=value.get("unjudged", False),
        )


@dataclass
class Clock:
    """Seconds since the last logged step, by what they went to."""

    began: float = field(default_factory=time.perf_counter)
    steps: int = 0
    samples: int = 0
    tokens: float = 0.0
    data: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    saving: float = 0.0
    evaluating: float = 0.0


def derived_interval(total: int | None) -> int:
    """Ten times in a run, or every thousand steps where its length is not known."""
    return max(1, total // 10) if total else 1000


def peak_gib(device: torch.device) -> float:
    """The most memory this rank has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
