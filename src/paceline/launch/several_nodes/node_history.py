"""The history of a run's nodes: why each attempt on several nodes was followed by another one, in the order of time."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from paceline.console.formatting import plural
from paceline.filesystem.atomic_files import read_json
from paceline.launch.failures.failure_record import FIRST_FAILURE, LOST_NODE, Failure
from paceline.launch.several_nodes.node_stays import AttemptNodes, NodeStay, read_node_stays
from paceline.run_folder.run_folder import RunFolder

Event = Mapping[str, Any]
_SUDDEN_END = "its agent ended without a message"


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """The loss of the head of an attempt: why it is thought to be gone, and the time of the last sign of it."""

    reason: str
    time: float


def describe_attempt_ends(
    run: RunFolder, events: Sequence[Event], *, restarts: Mapping[int, str], failures: Mapping[int, str]
) -> dict[int, str]:
    """Return a line about each attempt that another one followed: lost nodes, lost heads, and changes of their number.

    `events` are those of `events.jsonl`. `restarts` has the lines about the attempts after which the run restarted by
    itself, and `failures` those about all attempts that failed; on one machine, these are all lines.
    """
    lines = {**failures, **restarts}
    for before, after in pairwise(read_node_stays(run.path)):
        own_events = _events_of(events, before.attempt)
        start = next(iter(_events_of(events, after.attempt)), None)
        if before.attempt not in restarts and start is not None and own_events and not start.get("is_restart"):
            text = _describe_end(run, before, after, own_events, start)
            if text:
                lines[before.attempt] = f"attempt {before.attempt}: {text}"
        change = _describe_change(before, after)
        if before.attempt in lines and change:
            lines[before.attempt] += f"; {change}"
    return dict(sorted(lines.items()))


def find_head_losses(run: RunFolder, events: Sequence[Event]) -> dict[int, HeadLoss]:
    """Return the attempts whose head was lost: its members recorded it, or the next attempt shows it."""
    losses = {}
    attempts = read_node_stays(run.path)
    for before, after in zip_longest(attempts, attempts[1:]):
        failure, time = _recorded_failure(run.attempt_folder(before.attempt) / FIRST_FAILURE)
        if failure is not None:
            reason = failure.message.partition(" is gone: ")[2]
            if failure.kind == LOST_NODE and failure.rank == 0 and reason:
                losses[before.attempt] = HeadLoss(reason=reason, time=time)
            continue
        own_events = _events_of(events, before.attempt)
        start = next(iter(_events_of(events, after.attempt)), None) if after is not None else None
        has_ended = any(event.get("event") == "RunEnded" for event in own_events)
        if start is not None and own_events and not has_ended and not start.get("is_restart"):
            losses[before.attempt] = HeadLoss(reason=_SUDDEN_END, time=_time(own_events[-1]))
    return losses


def _events_of(events: Sequence[Event], attempt: int) -> list[Event]:
    """Return the events of an attempt, of which the first one is its start; none if it has not begun to train."""
    starts = [place for place, event in enumerate(events) if event.get("event") == "RunStarted"]
    for place, end in pairwise([*starts, len(events)]):
        if events[place].get("attempt") == attempt:
            return list(events[place:end])
    return []


def _describe_end(
    run: RunFolder, before: AttemptNodes, after: AttemptNodes, own_events: Sequence[Event], start: Event
) -> str:
    """Return why an attempt ended that no restart of its own command followed; empty if it only was resumed."""
    step = max((event["step"] for event in own_events if isinstance(event.get("step"), int)), default=0)
    end = next((event for event in own_events if event.get("event") == "RunEnded"), None)
    if end is not None:
        new, gone = _differing_nodes(before, after)
        parts = [f"{after.describe(stay)} came" for stay in new] + [
            f"{before.describe(stay)} left ({stay.reason or 'it was asked to stop'})" for stay in gone
        ]
        text = f"{' and '.join(parts)} at step {end.get('step', step)}" if parts else ""
        return text + _describe_pause(_time(start) - _time(end)) if text else ""
    resumed = start.get("resumed_from")
    origin = f"step {resumed} (disk)" if resumed else "the first step"
    failure, time = _recorded_failure(run.attempt_folder(before.attempt) / FIRST_FAILURE)
    if failure is None:
        head = next((before.describe(stay) for stay in before.nodes if stay.node == 0), "node 0")
        message, time = f"{head} is gone: {_SUDDEN_END}; last logged step {step}", _time(own_events[-1])
    else:
        message = failure.summary
    return f"{message}; started again from {origin}{_describe_pause(_time(start) - time)}"


def _recorded_failure(path: Path) -> tuple[Failure | None, float]:
    """Return the failure that ended an attempt, and when; None if there is no readable record."""
    with suppress(OSError, ValueError, msgspec.ValidationError):
        return msgspec.convert(read_json(path), Failure), path.stat().st_mtime
    return None, 0.0


def _describe_change(before: AttemptNodes, after: AttemptNodes) -> str:
    """Return on which nodes the run continued, if these are others than before."""
    new, gone = _differing_nodes(before, after)
    if not new and not gone:
        return ""
    num_nodes = len({stay.node for stay in after.nodes})
    num_ranks = sum(stay.num_ranks for stay in {stay.node: stay for stay in after.nodes}.values())
    more = [f"without node {stay.node} ({before.host(stay)})" for stay in gone]
    more += [f"with node {stay.node} ({after.host(stay)})" for stay in new]
    return f"continued on {plural(num_nodes, 'node')} and {plural(num_ranks, 'rank')}, {', '.join(more)}"


def _differing_nodes(before: AttemptNodes, after: AttemptNodes) -> tuple[list[NodeStay], list[NodeStay]]:
    """Return the stays of the nodes that only the later attempt has, and of those that only the earlier one has."""
    old, new = ({stay.node: stay for stay in each.nodes} for each in (before, after))
    return [new[node] for node in new if node not in old], [old[node] for node in old if node not in new]


def _describe_pause(seconds: float) -> str:
    return f" after {seconds:.1f} s" if seconds > 0 else ""


def _time(event: Event) -> float:
    value = event.get("time")
    return float(value) if isinstance(value, int | float) else 0.0
