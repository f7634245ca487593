"""The console output: one line for each logged step, and one or more lines for each other event."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.console.formatting import format_duration, format_metric, format_size, long_duration, plural
from paceline.console.output import print_line, take_dropped_note
from paceline.events import (
    CheckpointRefused,
    CheckpointSaved,
    CheckpointUploaded,
    EvalDone,
    Event,
    ForecastChecked,
    Note,
    Restarted,
    RunEnded,
    RunStarted,
    Staleness,
    StepDone,
    UploadFailed,
)

VERBOSE = "PACELINE_VERBOSE"  # set by `-v`: the ranks inherit it
BANNER_LINES = 5
_ROUTINE_TOPICS = (
    "run",
    "layout",
    "resumed",
    "update",
    "compress",
    "pipeline",
    "steps",
    "batch",
    "model",
)  # by importance
_DETAIL_TOPICS = ("backend", "threads", "precision", "buffers", "batch norm", "lr")  # printed only with `-v`


def format_event(event: Event, *, total: int | None = None) -> str:
    """Format one event as text. The text is empty if the event's class is unknown.

    `total` is the number of steps of the run, for the remaining time in a step's line.
    """
    if isinstance(event, StepDone):
        return _format_step(event, total=total)
    if isinstance(event, EvalDone):
        numbers = " | ".join(f"{name} {format_metric(value)}" for name, value in event.metrics.items())
        extra = "".join(f"\n{name}: {text}" for name, text in event.extra.items())
        average_note = " | averaged weights" if event.average else ""
        samples = f"{plural(event.samples, 'sample')}, each once, in {format_duration(event.seconds)}"
        return f"eval {event.step} | {numbers}{average_note} | {samples}{extra}"
    if isinstance(event, Staleness) and all("waited_seconds" in participant for participant in event.told):
        return f"sites at step {event.step} | {' | '.join(map(_format_site, event.told))}"
    if isinstance(event, Staleness):
        parts = [*map(_format_max_staleness, event.told), *_format_lost_additions(event.told)]
        return f"staleness at step {event.step} | {' | '.join(parts)}"
    if isinstance(event, ForecastChecked):
        return _format_forecast(event)
    if isinstance(event, CheckpointSaved):
        mark, duration = " (best)" if event.best else "", format_duration(event.seconds)
        if event.background_seconds:
            duration += f", and {format_duration(event.background_seconds)} in the background"
        return f"saved {Path(event.path).name}{mark} | {format_size(event.num_bytes)} in {duration}"
    if isinstance(event, CheckpointUploaded):
        return f"uploaded {event.url} | {format_size(event.num_bytes)} in {format_duration(event.seconds)}"
    if isinstance(event, UploadFailed):
        return _format_failed_upload(event)
    if isinstance(event, CheckpointRefused):
        return f"refused {event.path}: {event.reason}"
    if isinstance(event, Note):
        return event.text if event.level == "info" else f"{event.level}: {event.text}"
    if isinstance(event, RunStarted):
        return "" if event.is_restart else "\n".join(event.banner)
    if isinstance(event, Restarted):
        return f"{event.reason}; {event.outcome}"
    if isinstance(event, RunEnded):
        return f"{event.status} at step {event.step} after {event.seconds:.1f} s"
    return ""


def _format_failed_upload(event: UploadFailed) -> str:
    outcome = (
        "is only on disk; the same command uploads it"
        if event.is_final
        else "is not uploaded yet; the run continues and tries again"
    )
    return f"warning: step {event.step} {outcome}: {event.reason}"


def _format_site(participant: Mapping[str, Any]) -> str:
    return f"{participant['who']}: {format_size(participant['sent_bytes'])} sent, {format_duration(participant['waited_seconds'])} waited"


def _format_max_staleness(participant: Mapping[str, Any]) -> str:
    max_staleness = max((staleness for staleness, _ in participant["late"]), default=0)
    versions = f", {plural(participant['versions'], 'version')}" if "versions" in participant else ""
    return f"{participant['who']}: at most {plural(max_staleness, 'update')}{versions}"


def _format_lost_additions(participants: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a text on the lost additions to Hogwild's shadow counters. Every rank reports the same counts.

    Each parameter has one shadow counter. Every update adds 1 to it without a lock, as it adds to the parameter, so the
    lost additions are an estimate of the lost updates.
    """
    if participants and "lost" in participants[0]:
        lost, made = participants[0]["lost"], participants[0]["made"]
        yield f"{lost:,} of {made:,} additions to the shadow counters were lost (an estimate of lost updates)"


def _format_forecast(event: ForecastChecked) -> str:
    method = (
        "on the device" if event.measured_by == "allocator" else "more resident memory than before the model was built"
    )
    ratio = "" if event.memory_ratio is None else f" ({event.memory_ratio:.2f} times)"
    memory = "" if event.measured_bytes is None else f"{format_size(event.measured_bytes)} {method}{ratio}, "
    load = f" while other programs used {event.others:.0%} of the cores" if event.others else ""
    return (
        f"forecast | {format_size(event.peak_bytes)} on the fullest rank, {format_duration(event.step_seconds)} per step | "
        f"measured {memory}{format_duration(event.measured_seconds)} per step ({event.time_ratio:.2f} times){load}"
    )


def _format_step(event: StepDone, *, total: int | None) -> str:
    """Format a logged step in columns of constant width, with the remaining time at the pace of this step."""
    parts = [f"step {event.step:<{len(str(total or 0))}}", f"epoch {event.epoch:5.2f}"]
    parts.append(f"loss {format_metric(event.loss):>7}")
    if event.grad_norm is not None:
        parts.append(f"grad_norm {format_metric(event.grad_norm, decimals=3):>7}")
    parts.append(f"lr {event.lr:.2e}")
    parts.append(f"{event.samples_per_second:6.0f} samples/s")
    if event.tokens_per_second is not None:
        parts.append(f"{event.tokens_per_second / 1e3:6.1f}k tokens/s")
    step_seconds = event.step_seconds or 1.0
    time_split = f"data {event.data_seconds / step_seconds:3.0%} comm {event.communication_seconds / step_seconds:3.0%}"
    parts.append(f"{event.step_seconds * 1e3:6.1f} ms ({time_split})")
    if total and event.step <= total:
        parts.append(f"ETA {long_duration((total - event.step) * event.step_seconds)}")
    return " | ".join(parts)


def short_banner(lines: Sequence[str]) -> list[str]:
    """Return the most important lines of the start banner, at most `BANNER_LINES`, plus every warning and note.

    A line that is neither routine nor a detail is a note on something unusual in this run.
    """
    routine = [line for line in lines if _topic(line) in _ROUTINE_TOPICS]
    shown = sorted(routine, key=lambda line: _ROUTINE_TOPICS.index(_topic(line)))[:BANNER_LINES]
    return [line for line in lines if line in shown or not (_topic(line) in _ROUTINE_TOPICS or _is_detail(line))]


def _topic(line: str) -> str:
    return line.partition(":")[0]


def _is_detail(line: str) -> bool:
    return _topic(line) in _DETAIL_TOPICS or (_topic(line) == "data" and line.endswith("per epoch"))


def _print_or_raise(text: str) -> None:
    print_line(text, end="")
    if note := take_dropped_note():
        raise OSError(note)


class ConsoleSink:
    """A sink that prints each event as one or more lines. An event of an unknown class prints nothing.

    It raises an OSError if the console can't be written, so that the run records the loss of output.
    """

    name = "the console"

    def __init__(self, write: Callable[[str], object] | None = None, *, is_verbose: bool | None = None) -> None:
        self._write = write or _print_or_raise
        self._is_verbose = bool(os.environ.get(VERBOSE)) if is_verbose is None else is_verbose
        self._total: int | None = None

    def handle(self, event: Event) -> None:
        """Print the event."""
        if isinstance(event, RunStarted):
            self._total = event.total_steps
            event = event if self._is_verbose else replace(event, banner=tuple(short_banner(event.banner)))
        line = format_event(event, total=self._total)
        if line:
            self._write(f"{line}\n")

    def close(self) -> None:
        """Do nothing: no resource is open."""
