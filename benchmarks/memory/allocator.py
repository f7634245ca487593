"""The CPU allocator's own account: every block that it gave out or took back, and the sum it then had given out.

torch's allocator reports each block to the profiler, with its size, its address and the sum over all blocks. By itself
it keeps that sum only while a profiler runs in the same thread; with the flag that `count_all_threads` sets it keeps it
always and in every thread, so that the sum in each event is absolute and one profile around the steps is enough.

Seen: every tensor's memory whoever made it, also what `resize_` empties and fills again, what C++ makes for itself
(DDP's buckets, the copies that gloo's process group reduces, gathered weights), and what oneDNN asks torch for (weights
in its own order, its scratch). Not seen: memory from elsewhere than torch's allocator (buffers inside gloo, packed
matrices of MKL, numpy's arrays, memory shared between processes), Python's objects, what the allocator rounds up.
Blocks of other threads are in the sum without an event of their own: `Account.unseen_bytes` says how much moved so.
"""

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

FLAG = "FLAGS_caffe2_report_cpu_memory_usage"  # in libc10, tried with torch 2.13
_MEMORY, _OPTIMIZER, _BACKWARD, _STEP = "[memory]", "Optimizer.step#", "autograd::engine::", "measured step "


def count_all_threads() -> None:
    """From here on the allocator keeps its sum always. What was there before is in no sum: call it first of all."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, FLAG).value = True


@dataclass(frozen=True, kw_only=True)
class Event:
    """A block: `num_bytes` below 0 was taken back. `total` is the sum afterwards, over all threads."""

    at: float
    num_bytes: int
    total: int
    address: int
    thread: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """What ran from `start` to `end`, on the profiler's clock."""

    name: str
    start: float
    end: float
    thread: int


@dataclass(frozen=True, kw_only=True)
class Account:
    """What lay in memory while it was watched."""

    live_before: int
    """Before the first block moved."""
    live_after: int
    peak: int
    peaks: tuple[int, ...]
    """Of each step that was marked."""
    inside: tuple[str, ...]
    """What ran at the peak, from outside in."""
    num_events: int
    unseen_bytes: int
    """That moved without an event of their own, both ways."""
    blocks_left: Mapping[int, int] = field(default_factory=dict)
    """Address to bytes of what was given out while it was watched, and not taken back."""

    @property
    def phase(self) -> str:
        """In what part of a step the peak was; `forward` is all the rest: loss, clipping, gathering new weights."""
        if any(name.startswith(_OPTIMIZER) for name in self.inside):
            return "optimizer"
        return "backward" if any(name.startswith(_BACKWARD) for name in self.inside) else "forward"


class Watching:
    """What is behind `watch`; `account` is there when it has ended."""

    account: Account

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark a step."""
        with record_function(f"{_STEP}{number}"):
            yield


@contextmanager
def watch(*, folder: Path) -> Iterator[Watching]:
    """Account for what this thread does meanwhile. `folder` gets a file for a moment."""
    watching, path = Watching(), folder / f"memory-{id(folder)}.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield watching
    try:
        profiler.export_chrome_trace(str(path))
        found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    finally:
        path.unlink(missing_ok=True)
    watching.account = replay(read_events(found), spans=read_spans(found))


def read_events(trace: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Those of main memory, in order of time."""
    found = [
        Event(
            at=float(each["ts"]),
            num_bytes=int(each["args"]["Bytes"]),
            total=int(each["args"]["Total Allocated"]),
            address=int(each["args"]["Addr"]),
            thread=int(each["tid"]),
        )
        for each in trace
        if each.get("name") == _MEMORY and each["args"]["Device Type"] == 0
    ]
    return sorted(found, key=lambda event: event.at)


def read_spans(trace: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Operations and marks."""
    return [
        Span(name=each["name"], start=float(each["ts"]), end=float(each["ts"]) + float(each["dur"]), thread=each["tid"])
        for each in trace
        if each.get("ph") == "X" and each.get("cat") in ("cpu_op", "user_annotation")
    ]


def replay(events: Sequence[Event], *, spans: Sequence[Span] = ()) -> Account:
    """The account that the events give. What a sum says beyond the event before it moved in another thread."""
    if not events:
        raise RuntimeError("torch's allocator reported nothing: a profiler without memory, or no block moved")
    live = before = events[0].total - events[0].num_bytes
    unseen, blocks, highest = 0, {}, None
    for event in events:
        unseen += abs(event.total - (live + event.num_bytes))
        live = event.total
        if event.num_bytes > 0:
            blocks[event.address] = event.num_bytes
        else:
            blocks.pop(event.address, None)
        if highest is None or live > highest.total:
            highest = event
    assert highest is not None
    return Account(
        live_before=before,
        live_after=live,
        peak=max(before, highest.total),
        peaks=tuple(_peak_in(each, events) for each in _steps(spans)),
        inside=_inside(highest, spans),
        num_events=len(events),
        unseen_bytes=unseen,
        blocks_left=blocks,
    )


def _steps(spans: Sequence[Span]) -> list[Span]:
    return sorted((each for each in spans if each.name.startswith(_STEP)), key=lambda span: span.start)


def _peak_in(step: Span, events: Sequence[Event]) -> int:
    inside = [event for event in events if step.start <= event.at <= step.end]
    return max((max(event.total, event.total - event.num_bytes) for event in inside), default=0)


def _inside(event: Event, spans: Sequence[Span]) -> tuple[str, ...]:
    around = [each for each in spans if each.thread == event.thread and each.start <= event.at <= each.end]
    return tuple(each.name for each in sorted(around, key=lambda span: span.start - span.end))
