"""The console output: one log line for each logged step, and one line for every other event."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.console.formatting import format_duration, format_size, plural
from paceline.console.output import print_line
from paceline.events import (
    CheckpointRefused,
    CheckpointSaved,
    EvalDone,
    Event,
    ForecastChecked,
    Note,
    RunEnded,
    RunStarted,
    Staleness,
    StepDone,
)


def line_of(event: Event) -> str:
    """Format one event as text."""
    if isinstance(event, StepDone):
        return _step(event)
    if isinstance(event, EvalDone):
        numbers = " | ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
        extra = "".join(f"\n{name}: {text}" for name, text in event.extra.items())
        of = " | averaged weights" if event.average else ""
        samples = f"{plural(event.samples, 'sample')}, each once, in {format_duration(event.seconds)}"
        return f"eval {event.step} | {numbers}{of} | {samples}{extra}"
    if isinstance(event, Staleness) and all("waited_seconds" in told for told in event.told):
        return f"sites {event.step} | {' | '.join(map(_met, event.told))}"
    if isinstance(event, Staleness):
        return f"late {event.step} | {' | '.join([*map(_late, event.told), *_lost(event.told)])}"
    if isinstance(event, ForecastChecked):
        return _foretold(event)
    if isinstance(event, CheckpointSaved):
        mark = " (best)" if event.best else ""
        return f"saved {event.path}{mark} | {format_size(event.num_bytes)} in {format_duration(event.seconds)}"
    if isinstance(event, CheckpointRefused):
        return f"refused {event.path}: {event.reason}"
    if isinstance(event, Note):
        return event.text if event.level == "info" else f"{event.level}: {event.text}"
    if isinstance(event, RunStarted):
        return "\n".join(event.banner)
    if isinstance(event, RunEnded):
        return f"{event.status} at step {event.step} after {event.seconds:.1f} s"
    return ""


def _met(told: Mapping[str, Any]) -> str:
    return f"{told['who']}: {format_size(told['sent_bytes'])} sent, {format_duration(told['waited_seconds'])} waited"


def _late(told: Mapping[str, Any]) -> str:
    most = max((late for late, _ in told["late"]), default=0)
    held = f", {plural(told['versions'], 'version')}" if "versions" in told else ""
    return f"{told['who']}: at most {plural(most, 'update')}{held}"


def _lost(told: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the counts of lost additions; every rank reports the same counts."""
    if told and "lost" in told[0]:
        yield f"{told[0]['lost']:,} of {told[0]['made']:,} additions to the shadow counters were lost"


def _foretold(event: ForecastChecked) -> str:
    by = "on the device" if event.measured_by == "allocator" else "of resident memory added since before its model"
    times = "" if event.memory_ratio is None else f" ({event.memory_ratio:.2f} times)"
    memory = "" if event.measured_bytes is None else f"{format_size(event.measured_bytes)} {by}{times}, "
    others = f" while other programs used {event.others:.0%} of the cores" if event.others else ""
    return (
        f"forecast | {format_size(event.peak_bytes)} on the fullest rank, {format_duration(event.step_seconds)} per step | "
        f"measured {memory}{format_duration(event.measured_seconds)} per step ({event.time_ratio:.2f} times){others}"
    )


def _step(event: StepDone) -> str:
    parts = [f"step {event.step}", f"epoch {event.epoch:.2f}", f"loss {event.loss:.4f}"]
    if event.grad_norm is not None:
        parts.append(f"grad_norm {event.grad_norm:.3f}")
    parts.append(f"lr {event.lr:.2e}")
    parts.append(f"{event.samples_per_second:.0f} samples/s")
    if event.tokens_per_second is not None:
        parts.append(f"{event.tokens_per_second / 1e3:.1f}k tokens/s")
    total = event.step_seconds or 1.0
    split = f"data {event.data_seconds / total:.0%} comm {event.communication_seconds / total:.0%}"
    return " | ".join([*parts, f"{event.step_seconds * 1e3:.1f} ms ({split})"])


class ConsoleSink:
    """A sink that prints one line per event."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or partial(print_line, end="")

    def handle(self, event: Event) -> None:
        """Print the event."""
        line = line_of(event)
        if line:
            self._write(f"{line}\n")

    def close(self) -> None:
        """Do nothing: no resource is open."""
