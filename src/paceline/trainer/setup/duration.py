"""The length of a run, the loop's saved progress, and the times of its steps."""

import math
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from paceline.config.settings import Settings
from paceline.data.order.cursor import Cursor

_MIN_INTERVAL = 10


@dataclass(frozen=True, kw_only=True)
class Length:
    """The limits of a run's length. The first limit that is reached ends the run.

    `epoch_samples` is the number of samples in an epoch, or None for a stream.
    """

    steps: int | None = None
    samples: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    epoch_samples: int | None = None

    def total_steps(self, *, batch: int, drop_last: bool) -> int | None:
        """Return the number of steps, or None if it is not known in advance. `batch` is the global batch size."""
        limits = [] if self.steps is None else [self.steps]
        if self.epoch_samples is None:
            limits += [] if self.samples is None else [math.ceil(self.samples / batch)]
            return min(limits, default=None)
        per_epoch = self.epoch_samples // batch if drop_last else math.ceil(self.epoch_samples / batch)
        if self.epochs is not None:
            limits.append(max(1, math.ceil(per_epoch * self.epochs)))
        if self.samples is not None:
            full_epochs, remaining_samples = divmod(self.samples, self.epoch_samples)
            limits.append(max(1, full_epochs * per_epoch + min(per_epoch, math.ceil(remaining_samples / batch))))
        return min(limits, default=None)

    @property
    def is_open(self) -> bool:
        """True if a limit may end the run before `total_steps`: tokens, or samples and epochs of a stream."""
        is_stream = self.epoch_samples is None
        return self.tokens is not None or (is_stream and (self.samples is not None or self.epochs is not None))

    def is_reached(self, cursor: Cursor, *, tokens: float) -> bool:
        """Return True if a limit is reached that may end the run early (see `is_open`)."""
        if self.tokens is not None and tokens >= self.tokens:
            return True
        if self.samples is not None and self.epoch_samples is None and cursor.samples >= self.samples:
            return True
        return self.epoch_samples is None and self.epochs is not None and cursor.epoch >= self.epochs


@dataclass
class Progress:
    """The loop's state that is saved with the cursor. The names of the fields are keys of checkpoints."""

    tokens: float = 0.0
    """The tokens trained so far."""
    best: float | None = None
    """The best value for `Job(best=)`; None before the first evaluation."""
    best_of: str = ""
    """The metric and the mode of `best`, such as `loss:min`."""
    waited: int = 0
    """The number of evaluations since `rule_best`."""
    rule_best: float | None = None
    """The best value for early stopping; None before the first evaluation."""
    rule_of: str = ""
    """The metric and the mode of `rule_best`."""
    is_evaluation_pending: bool = False
    """Whether an evaluation was due whose outcome is not recorded yet."""
    spike_history: list[list[float | None]] = field(default_factory=list)
    """The last values of the spike detector; empty if there is none."""

    def as_json(self) -> dict[str, Any]:
        """Return the progress as JSON for a checkpoint, under the keys of its format."""
        values = asdict(self)
        return {**values, "unjudged": values.pop("is_evaluation_pending")}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the progress that a checkpoint holds."""
        return cls(
            tokens=value.get("tokens", 0.0),
            best=value.get("best"),
            best_of=value.get("best_of", ""),
            waited=value.get("waited", 0),
            rule_best=value.get("rule_best"),
            rule_of=value.get("rule_of", ""),
            is_evaluation_pending=value.get("unjudged", False),
            spike_history=value.get("spike_history", []),
        )


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The mean time of the steps between two logged lines, by activity."""

    step_seconds: float = 0.0
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    samples_per_second: float = 0.0


@dataclass
class Clock:
    """The seconds since the last logged step, by activity."""

    start_time: float = field(default_factory=time.perf_counter)
    steps: int = 0
    samples: int = 0
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    save_seconds: float = 0.0
    evaluation_seconds: float = 0.0

    def step_seconds(self) -> float:
        """Return the seconds of the steps, including data reading but not saving or evaluation."""
        return time.perf_counter() - self.start_time - self.save_seconds - self.evaluation_seconds

    def pace(self) -> Pace:
        """Return the mean pace of the steps so far."""
        step_seconds, steps = max(self.step_seconds(), 1e-9), max(self.steps, 1)
        return Pace(
            step_seconds=step_seconds / steps,
            data_seconds=self.data_seconds / steps,
            compute_seconds=self.compute_seconds / steps,
            communication_seconds=self.communication_seconds / steps,
            samples_per_second=self.samples / step_seconds,
        )


def derived_interval(total: int | None) -> int:
    """Return a tenth of the run in steps, but at least 10; 1000 if the run's length is not known."""
    return max(_MIN_INTERVAL, total // 10) if total else 1000


def format_interval(every: int, *, total: int | None) -> str:
    """Return an interval of steps in words."""
    return "at the end" if total is not None and every >= total else f"every {every} and at the end"


def requested_length(settings: Settings, *, epoch_samples: int | None) -> Length:
    """Return the limits in the settings, or one epoch if the settings have no limit."""
    train_settings = settings.train
    has_no_limit = (
        train_settings.steps is None
        and train_settings.samples is None
        and train_settings.tokens is None
        and train_settings.epochs is None
    )
    return Length(
        steps=train_settings.steps,
        samples=train_settings.samples,
        tokens=train_settings.tokens,
        epochs=1.0 if has_no_limit else train_settings.epochs,
        epoch_samples=epoch_samples,
    )


def peak_gib(device: torch.device) -> float:
    """Return this rank's peak memory so far, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
