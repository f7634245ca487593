"""The history in a run folder: numbers by step, events, and a count of unreadable lines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.filesystem.atomic_files import read_json
from paceline.reporting.sinks.jsonl import read_counted
from paceline.run_folder.run_folder import RunFolder

Numbers = dict[int, dict[str, Any]]
Point = tuple[float, float]
_STARTED, _STEP = "RunStarted", "StepDone"


@dataclass(frozen=True, kw_only=True)
class ResumeMark:
    """A step at which a run was resumed, and what changed there."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class History:
    """The readable history of one run. A step that was repeated keeps its last numbers only."""

    run: RunFolder
    steps: Numbers
    events: list[dict[str, Any]]
    torn: dict[str, int]
    again: int

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Return the start event of each attempt."""
        return self.of(_STARTED)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    def last_of(self, kind: str) -> dict[str, Any]:
        """Return the last event of a kind, or an empty mapping."""
        found = self.of(kind)
        return found[-1] if found else {}

    def points(self, name: str) -> list[Point]:
        """Return a number over steps. Non-numeric values are skipped, non-finite values are kept."""
        return _points([(step, record.get(name)) for step, record in self.steps.items()])

    def samples(self) -> list[Point]:
        """Return the samples seen, over steps."""
        return sorted(_points([(e.get("step"), e.get("samples")) for e in _kept(self.of(_STEP), self.starts)]))

    def seconds(self) -> list[Point]:
        """Return the seconds of all attempts, each counted from its start, over steps."""
        return self._summed(lambda record, start: _seconds(record) - start)

    def sent(self) -> list[Point]:
        """Return the bytes that rank 0 has sent in all attempts, over steps."""
        return self._summed(lambda record, _: record.get("sent_bytes"))

    def against(self, name: str, axis: Sequence[Point]) -> list[Point]:
        """Return one number as a function of another that is known by step."""
        known = dict(axis)
        return [(known[step], value) for step, value in self.points(name) if step in known]

    def _summed(self, of: Callable[[dict[str, Any], float], Any]) -> list[Point]:
        """Return a cumulative number over all attempts, from a value that restarts at zero in each attempt."""
        begun = [_seconds(start) for start in self.starts] or [0.0]
        found: list[Point] = []
        done, last, attempt = 0.0, 0.0, 0
        for step, record in self.steps.items():
            now = max((n for n, at in enumerate(begun) if at <= _seconds(record)), default=0)
            if now != attempt:
                done, attempt = last, now
            for _, value in _points([(step, of(record, begun[now]))]):
                last = done + value
                found.append((float(step), last))
        return found

    def reached(self) -> int:
        """Return the last step that the run reached, logged or not, according to its files."""
        told = _kept([event for event in self.events if isinstance(event.get("step"), int)], self.starts)
        return max([0, *self.steps, *(_whole(event.get("step")) for event in told)])

    def names(self) -> list[str]:
        """Return the sorted names of all logged numbers."""
        return sorted({name for record in self.steps.values() for name in record} - {"step", "time"})

    def last(self) -> dict[str, Any]:
        """Return the newest value of every number."""
        merged: dict[str, Any] = {}
        for record in self.steps.values():
            merged |= record
        return merged

    def marks(self) -> list[ResumeMark]:
        """Return each resume, with the number of ranks before and after."""
        found = []
        for before, after in pairwise(self.starts):
            old, new = before.get("ranks"), after.get("ranks")
            text = "resumed" if old == new else f"{old}→{new} ranks"
            found.append(ResumeMark(step=_whole(after.get("resumed_from")), text=text))
        return found


def read_history(run: RunFolder) -> History:
    """Read a run's history. Missing or torn files are not an error."""
    events, torn_events = read_counted(run.events)
    records, torn_metrics = read_counted(run.metrics)
    events = [event for event in events if isinstance(event.get("event"), str)]
    starts = [event for event in events if event["event"] == _STARTED]
    kept = _kept([record for record in records if isinstance(record.get("step"), int)], starts)
    steps: Numbers = {}
    for record in kept:
        steps.setdefault(record["step"], {}).update(record)
    torn = {name: count for name, count in (("events", torn_events), ("metrics", torn_metrics)) if count}
    again = sum(_is_log(r) for r in records) - sum(_is_log(r) for r in kept)
    return History(run=run, steps=dict(sorted(steps.items())), events=events, torn=torn, again=again)


def json_or_none(path: Path) -> Any:
    """Return the content of a small JSON file, or None if it can't be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _kept(records: list[dict[str, Any]], starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records without those of steps that a later attempt repeated."""
    cuts = [(_seconds(start), _whole(start.get("resumed_from"))) for start in starts[1:]]
    return [r for r in records if not any(_seconds(r) < time and _whole(r.get("step")) > step for time, step in cuts)]


def _is_log(record: dict[str, Any]) -> bool:
    return "loss" in record


def _seconds(record: dict[str, Any]) -> float:
    value = record.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _points(pairs: list[tuple[Any, Any]]) -> list[Point]:
    found = []
    for step, value in pairs:
        try:
            found.append((float(step), float(value)))
        except (TypeError, ValueError, OverflowError):
            continue
    return found
