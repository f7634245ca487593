"""The history of a run, from its folder: metrics by step, events, and the number of unreadable lines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.filesystem.atomic_files import read_json
from paceline.reporting.sinks.jsonl import read_records
from paceline.run_folder.run_folder import RunFolder

RecordsByStep = dict[int, dict[str, Any]]
Point = tuple[float, float]
_STARTED, _STEP = "RunStarted", "StepDone"


@dataclass(frozen=True, kw_only=True)
class ResumeMark:
    """A step at which a run was resumed, and what changed there."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class History:
    """The history of one run. `steps` has the metrics of each logged step that was not discarded.

    If an attempt was resumed from step n, the records that earlier attempts logged after step n are discarded.
    `num_discarded` is the number of discarded step records, and `num_unreadable` is the number of unreadable lines by
    file.
    """

    run: RunFolder
    steps: RecordsByStep
    events: list[dict[str, Any]]
    num_unreadable: dict[str, int]
    num_discarded: int

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Return the start event of each attempt."""
        return self.events_of_kind(_STARTED)

    @property
    def has_ended(self) -> bool:
        """Return whether the newest attempt that started has a recorded end."""
        started, ended = self.last_event(_STARTED), self.last_event("RunEnded")
        return bool(ended) and self.events.index(ended) >= (self.events.index(started) if started else 0)

    def events_of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    def last_event(self, kind: str) -> dict[str, Any]:
        """Return the last event of a kind, or an empty mapping."""
        events = self.events_of_kind(kind)
        return events[-1] if events else {}

    def points(self, name: str) -> list[Point]:
        """Return a metric over steps. Infinite values and NaN are included; values that are no numbers are left out."""
        return _points([(step, record.get(name)) for step, record in self.steps.items()])

    def samples(self) -> list[Point]:
        """Return the number of processed samples over steps."""
        return sorted(
            _points(
                [
                    (e.get("step"), e.get("samples"))
                    for e in _without_discarded_steps(self.events_of_kind(_STEP), self.starts)
                ]
            )
        )

    def seconds(self) -> list[Point]:
        """Return the run's duration in seconds over steps. Time between attempts or on discarded steps is left out."""
        return self._cumulative_points(lambda record, start: _event_time(record) - start)

    def sent_bytes(self) -> list[Point]:
        """Return the bytes that rank 0 has sent in all attempts, over steps. Bytes for discarded steps are left out."""
        return self._cumulative_points(lambda record, _: record.get("sent_bytes"))

    def points_against(self, name: str, axis: Sequence[Point]) -> list[Point]:
        """Return a metric over the values of `axis`, which has one value for each step."""
        axis_values = dict(axis)
        return [(axis_values[step], value) for step, value in self.points(name) if step in axis_values]

    def _cumulative_points(self, value_for: Callable[[dict[str, Any], float], Any]) -> list[Point]:
        """Return a number that accumulates over all attempts.

        `value_for` gets a step's record and the start time of its attempt, and returns the number since that start.
        An attempt continues from the number at the previous attempt's last step in `steps`.
        """
        start_times = [_event_time(start) for start in self.starts] or [0.0]
        points: list[Point] = []
        previous_total, total, attempt = 0.0, 0.0, 0
        for step, record in self.steps.items():
            current = max(
                (number for number, start_time in enumerate(start_times) if start_time <= _event_time(record)),
                default=0,
            )
            if current != attempt:
                previous_total, attempt = total, current
            for _, value in _points([(step, value_for(record, start_times[current]))]):
                total = previous_total + value
                points.append((float(step), total))
        return points

    def last_step(self) -> int:
        """Return the last step of the run, logged or not, according to its files."""
        step_events = _without_discarded_steps(
            [event for event in self.events if isinstance(event.get("step"), int)], self.starts
        )
        return max([0, *self.steps, *(_int_or_zero(event.get("step")) for event in step_events)])

    def metric_names(self) -> list[str]:
        """Return the sorted names of all logged metrics."""
        return sorted({name for record in self.steps.values() for name in record} - {"step", "time"})

    def latest_values(self) -> dict[str, Any]:
        """Return the newest value of every metric."""
        merged: dict[str, Any] = {}
        for record in self.steps.values():
            merged |= record
        return merged

    def resume_marks(self) -> list[ResumeMark]:
        """Return each resume, with the number of ranks before and after."""
        marks = []
        for before, after in pairwise(self.starts):
            old, new = before.get("ranks"), after.get("ranks")
            text = "resumed" if old == new else f"{old}→{new} ranks"
            marks.append(ResumeMark(step=_int_or_zero(after.get("resumed_from")), text=text))
        return marks


def read_history(run: RunFolder) -> History:
    """Read the history of a run. Missing files and truncated lines are not an error."""
    events, unreadable_events = read_records(run.events)
    records, unreadable_metrics = read_records(run.metrics)
    events = [event for event in events if isinstance(event.get("event"), str)]
    starts = [event for event in events if event["event"] == _STARTED]
    kept_records = _without_discarded_steps(
        [record for record in records if isinstance(record.get("step"), int)], starts
    )
    steps: RecordsByStep = {}
    for record in kept_records:
        steps.setdefault(record["step"], {}).update(record)
    num_unreadable = {
        name: count for name, count in (("events", unreadable_events), ("metrics", unreadable_metrics)) if count
    }
    num_discarded = sum(_is_step_record(r) for r in records) - sum(_is_step_record(r) for r in kept_records)
    return History(
        run=run,
        steps=dict(sorted(steps.items())),
        events=events,
        num_unreadable=num_unreadable,
        num_discarded=num_discarded,
    )


def json_or_none(path: Path) -> Any:
    """Return the content of a small JSON file, or None if it can't be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _without_discarded_steps(records: list[dict[str, Any]], starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records, except those on steps after the step from which a later attempt was resumed."""
    resumes = [(_event_time(start), _int_or_zero(start.get("resumed_from"))) for start in starts[1:]]
    return [
        r
        for r in records
        if not any(_event_time(r) < time and _int_or_zero(r.get("step")) > step for time, step in resumes)
    ]


def _is_step_record(record: dict[str, Any]) -> bool:
    return "loss" in record


def _event_time(record: dict[str, Any]) -> float:
    value = record.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


def _int_or_zero(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _points(pairs: list[tuple[Any, Any]]) -> list[Point]:
    points = []
    for step, value in pairs:
        try:
            points.append((float(step), float(value)))
        except (TypeError, ValueError, OverflowError):
            continue
    return points
