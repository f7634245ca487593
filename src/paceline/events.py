"""The events of a run, as typed values, and the bus that passes them to sinks."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.console.formatting import plural


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a run."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run, or its next attempt, begins. `is_restart` is True if the run restarted by itself after a fault."""

    run_id: str
    job: str
    layout: str
    ranks: int
    attempt: int = 1
    resumed_from: int | None = None
    total_steps: int | None = None
    banner: tuple[str, ...] = ()
    is_restart: bool = False


@dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """A run restarted by itself after a fault.

    `resumed_step` is the step of the checkpoint from which it continues, 0 if nothing had been saved. `repeated_steps`
    counts the steps that are computed again, with the step that the fault interrupted. `seconds` is the time from the
    fault until the ranks were ready for their next step. `source` is where the checkpoint was: on `disk` or in
    `memory`.
    """

    attempt: int
    reason: str
    failed_step: int
    resumed_step: int
    repeated_steps: int
    seconds: float
    source: str = "disk"

    @property
    def outcome(self) -> str:
        """The text on what the restart did, which follows the reason."""
        origin = f"step {self.resumed_step} ({self.source})" if self.resumed_step else "the first step"
        repeated = plural(self.repeated_steps, "step")
        return f"restarted in {self.seconds:.2f} s from {origin}; {repeated} repeated"


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """The values of a logged step.

    `memory_peak_gib`, `sent_bytes` and the fields that end in `_seconds` are measured on the first rank alone. With
    synchronous updates, the other values cover all ranks.

    `sent_bytes` counts the bytes that the first rank has sent since this attempt began (with local SGD, only those to
    other sites); None if unknown.

    `statistics` has the norm of each parameter (key `weight_norm/FQN`) and the norm of its gradient (key
    `grad_norm/FQN`). It is empty unless the setting `log.statistics` is on.
    """

    step: int
    epoch: float
    samples: int
    loss: float
    terms: dict[str, float] = field(default_factory=dict)
    grad_norm: float | None = None
    lr: float = 0.0
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    samples_per_second: float = 0.0
    tokens_per_second: float | None = None
    memory_peak_gib: float = 0.0
    sent_bytes: float | None = None
    statistics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvalDone(Event):
    """Exact metrics over a whole split.

    `average` is True if the averaged weights (`ema`) were evaluated. If the job's `on_eval` returns a dict, `metrics`
    also has the numbers of this dict, and `extra` has the other values of this dict as text.
    """

    step: int
    split: str
    metrics: dict[str, float]
    samples: int
    seconds: float
    average: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Staleness(Event):
    """The staleness of an asynchronous run's updates since this attempt began.

    `told` (a key of `events.jsonl`) has one entry for each participant. Every entry has the participant's name in
    `who`. Its `late` says how many gradients had each staleness, as pairs (staleness in updates, number of gradients).

    Some update rules have more keys in an entry:

    - A pipeline: `versions`, the maximum number of weight versions in memory, and `sent_bytes`.
    - Hogwild: `made` and `lost`. Every update adds 1 to a counter of each parameter, without a lock. `made` is the
      number of these additions by all workers, and `lost` is how many of them had no effect.
    - Local SGD: `sent_bytes`, the bytes sent to other sites, and `waited_seconds`, the time spent waiting for them.
    """

    step: int
    update: str
    told: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class ForecastChecked(Event):
    """The forecast of a run, compared with its first steps.

    `source` says how the forecast was made: by `--layout auto` (`auto`), by an earlier `paceline plan` (`plan`), or by
    a plan that timed steps of the layout (`timed`). The bytes are those of the rank with the largest peak.
    `measured_by` names the measurement: the device's `allocator`, or the growth of a process's `resident memory` since
    before its model was built. `memory_ratio` is None if the bytes can't be compared. `others` is the share of the
    cores that other programs used at the same time, or 0.0 if they left enough cores.
    """

    step: int
    layout: str
    source: str
    peak_bytes: int
    parts: Mapping[str, int]
    step_seconds: float
    measured_bytes: int | None
    measured_by: str
    measured_seconds: float
    memory_ratio: float | None
    time_ratio: float
    others: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint was written completely.

    The training waited for `seconds`. A checkpoint that was saved in the background was on disk `background_seconds`
    later.
    """

    step: int
    path: str
    seconds: float
    num_bytes: int
    best: bool = False
    background_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckpointUploaded(Event):
    """A checkpoint is complete in the remote store (`checkpoint.remote`), and `latest` there names it."""

    step: int
    url: str
    seconds: float
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class UploadFailed(Event):
    """A checkpoint could not be uploaded. It is on disk, and uploads are tried again unless the run has ended.

    Of several failures in a row, only the first is reported, and the one at the end of a run, with `is_final`.
    """

    step: int
    url: str
    reason: str
    is_final: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointRefused(Event):
    """A checkpoint could not be used."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """A message to the user."""

    text: str
    level: str = "info"


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run ends; `status` is done, stopped or failed."""

    status: str
    step: int
    exit_code: int
    seconds: float = 0.0


NAMES_ON_DISK = {"ForecastChecked": "Foretold"}
"""Event names in `events.jsonl` that differ from the class name, so that older files can be read."""


def as_dict(event: Event) -> dict[str, Any]:
    """Return the event as a dict for a JSON line."""
    return {"event": NAMES_ON_DISK.get(type(event).__name__, type(event).__name__), "time": time.time(), **vars(event)}


class Sink(Protocol):
    """A destination of events."""

    def handle(self, event: Event) -> None:
        """Handle one event."""

    def close(self) -> None:
        """Close the sink after the last event."""


def _sink_name(sink: Sink) -> str:
    """Return the name by which a user knows a sink: one of Paceline's own has it as `name`."""
    return str(getattr(sink, "name", type(sink).__name__))


class EventBus:
    """The bus that carries events to all sinks. A sink that raises never ends the run, and gets later events too.

    Several threads may use it: uploads run in a thread of their own.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)
        self._failures: list[tuple[Sink, type[Event]]] = []  # the failing sinks, and the event at which each failed
        self._lock = threading.RLock()

    def add_sink(self, sink: Sink) -> None:
        """Add a sink, which gets each event after the other sinks."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Pass `event` to every sink, and then a note about each sink that has begun to fail, or works again.

        The notes come last, because a full disk may make several sinks fail.
        """
        with self._lock:
            notes = [note for sink in self._sinks if (note := self._deliver(sink, event)) is not None]
            for note in notes:
                self.emit(note)

    def emit_all(self, events: Iterable[Event]) -> None:
        """Emit each of `events`."""
        for event in events:
            self.emit(event)

    def _deliver(self, sink: Sink, event: Event) -> Note | None:
        failed_kind = next((kind for other, kind in self._failures if other is sink), None)
        try:
            sink.handle(event)
        except Exception as error:
            if failed_kind is not None:
                return None
            self._failures.append((sink, type(event)))
            text = f"writing to {_sink_name(sink)} failed, and is tried again with each event: {error}"
            return Note(text=text, level="warning")
        if failed_kind is not type(event):  # it has not failed, or may ignore this kind of event
            return None
        self._failures = [failure for failure in self._failures if failure[0] is not sink]
        return Note(text=f"writing to {_sink_name(sink)} works again")

    def close(self) -> None:
        """Close every sink."""
        with self._lock:
            for sink in self._sinks:
                try:
                    sink.close()
                except Exception:
                    continue
            self._sinks = []


def forecast_ratios(event: ForecastChecked) -> Mapping[str, float]:
    """Return the measured values as multiples of their forecast."""
    memory = {} if event.memory_ratio is None else {"forecast/memory_ratio": event.memory_ratio}
    return {"forecast/time_ratio": event.time_ratio, **memory}


def step_metrics(event: StepDone) -> Mapping[str, float]:
    """Return a step's metrics by the names that logging tools commonly use."""
    step_seconds = event.step_seconds or 1.0
    metrics = {
        "loss": event.loss,
        "lr": event.lr,
        "samples_per_second": event.samples_per_second,
        "memory/peak_gib": event.memory_peak_gib,
        "time/step": event.step_seconds,
        "time/data": event.data_seconds / step_seconds,
        "time/compute": event.compute_seconds / step_seconds,
        "time/communication": event.communication_seconds / step_seconds,
        "time/checkpoint": event.checkpoint_seconds / step_seconds,
        "time/evaluation": event.evaluation_seconds / step_seconds,
    }
    if event.grad_norm is not None:
        metrics["grad_norm"] = event.grad_norm
    if event.tokens_per_second is not None:
        metrics["tokens_per_second"] = event.tokens_per_second
    if event.sent_bytes:
        metrics["sent_bytes"] = event.sent_bytes
    if len(event.terms) > 1:
        metrics |= {f"loss/{name}": value for name, value in event.terms.items()}
    return metrics | event.statistics
