"""What a run folder tells: its numbers by step, its events, and what could not be read."""

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
    """A step after which a run went on, and what changed there."""

    step: int
    text: str


@dataclass(frozen=True, kw_only=True)
class History:
    """One run, as far as its files can be read; a step that was done again has its last numbers only."""

    run: RunFolder
    steps: Numbers
    events: list[dict[str, Any]]
    torn: dict[str, int]
    again: int

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The start of each attempt."""
        return self.of(_STARTED)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    def last_of(self, kind: str) -> dict[str, Any]:
        """The last event of a kind, or nothing."""
        found = self.of(kind)
        return found[-1] if found else {}

    def points(self, name: str) -> list[Point]:
        """A number over steps; what is no number is passed over, what is not finite is kept."""
        return _points([(step, record.get(name)) for step, record in self.steps.items()])

    def samples(self) -> list[Point]:
        """Samples seen, over steps."""
        return sorted(_points([(e.get("step"), e.get("samples")) for e in _kept(self.of(_STEP), self.starts)]))

    def seconds(self) -> list[Point]:
        """Seconds of all attempts, from the start of each, over steps."""
        return self._summed(lambda record, start: _seconds(record) - start)

    def sent(self) -> list[Point]:
        """Bytes that the first rank has sent, in all attempts, over steps."""
        return self._summed(lambda record, _: record.get("sent_bytes"))

    def against(self, name: str, axis: Sequence[Point]) -> list[Point]:
        """A number over another that is known by step."""
        known = dict(axis)
        return [(known[step], value) for step, value in self.points(name) if step in known]

    def _summed(self, of: Callable[[dict[str, Any], float], Any]) -> list[Point]:
        """What begins anew in each attempt, as one that goes on."""
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
        """The step the run came to, logged or not, as far as its files say."""
        told = _kept([event for event in self.events if isinstance(event.get("step"), int)], self.starts)
        return max([0, *self.steps, *(_whole(event.get("step")) for event in told)])

    def names(self) -> list[str]:
        """Every name that a step has."""
        return sorted({name for record in self.steps.values() for name in record} - {"step", "time"})

    def last(self) -> dict[str, Any]:
        """The newest value of every number."""
        merged: dict[str, Any] = {}
        for record in self.steps.values():
            merged |= record
        return merged

    def marks(self) -> list[ResumeMark]:
        """Where it was resumed, and on how many ranks before and after."""
        found = []
        for before, after in pairwise(self.starts):
            old, new = before.get("ranks"), after.get("ranks")
            text = "resumed" if old == new else f"{old}→{new} ranks"
            found.append(ResumeMark(step=_whole(after.get("resumed_from")), text=text))
        return found


def read_history(run: RunFolder) -> History:
    """Read what is there; nothing that is missing or torn is an error."""
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
    """A small file, if it can be read."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _kept(records: list[dict[str, Any]], starts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the steps that a later attempt went back over."""
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
