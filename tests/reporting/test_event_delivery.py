"""Events reach each sink whatever another does; records and reports survive kills and full disks."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.events import EvalDone, Event, EventBus, Note, RunStarted, StepDone
from paceline.reporting.run_report import run_page
from paceline.reporting.sinks import jsonl
from paceline.reporting.sinks.console_lines import BANNER_LINES, ConsoleSink, format_event
from paceline.reporting.sinks.jsonl import JsonlSink, iter_records
from paceline.run_folder.run_folder import RunFolder


def step(number: int, **other: Any) -> StepDone:
    given: dict[str, Any] = {
        "step": number, "epoch": 0.31, "samples": number * 64, "loss": 2.1034, "grad_norm": 0.87, "lr": 3e-4,
        "step_seconds": 0.078, "data_seconds": 0.00078, "compute_seconds": 0.06, "communication_seconds": 0.00702,
        "samples_per_second": 812.0, "tokens_per_second": 52000.0,
    }  # fmt: skip
    return StepDone(**{**given, **other})


def record(run: RunFolder, *events: Event) -> None:
    sink = JsonlSink(run)
    for event in events:
        sink.handle(event)
    sink.close()


class Broken:
    def handle(self, event: Event) -> None:
        raise RuntimeError("no more")

    def close(self) -> None:
        raise RuntimeError("nor this")


class Kept:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def handle(self, event: Event) -> None:
        self.seen.append(event)

    def close(self) -> None:
        pass


def test_the_log_line_is_fixed() -> None:
    expected = (
        "step 120 | epoch  0.31 | loss  2.1034 | grad_norm   0.870 | lr 3.00e-04 |    812 samples/s |   52.0k tokens/s"
        " |   78.0 ms (data  1% comm  9%)"
    )
    assert format_event(step(120)) == expected


def test_log_lines_are_aligned_and_have_the_remaining_time() -> None:
    early, late = (
        format_event(step(1, loss=12.3, samples_per_second=9.0), total=2000),
        format_event(step(1990), total=2000),
    )
    bars = [[at for at, mark in enumerate(line) if mark == "|"] for line in (early, late)]
    assert bars[0] == bars[1], (early, late)
    assert early.startswith("step 1    | ") and early.endswith("| ETA 2.6 min") and late.endswith("| ETA 780 ms")
    assert format_event(step(2000), total=2000).endswith("| ETA 0 ms")
    assert "ETA" not in format_event(step(5)) and "ETA" not in format_event(step(11), total=10), (
        "an end that is not known"
    )


LINES = (
    "run: runs/a", "model: 10 trainable parameters", "layout: pp, 1 replica", "backend: gloo", "batch: 64 samples",
    "threads: 1", "pipeline: 1f1b", "warning: few microbatches", "data: 1,437 samples per epoch", "steps: 5",
    "precision: fp32", "buffers: fold", "batch norm: over microbatches", "note: no block is compiled", "lr: 0.003",
    "resumed: step-00000002",
)  # fmt: skip


@pytest.mark.parametrize("is_verbose", [False, True])
def test_the_start_banner_has_five_lines_and_every_warning(is_verbose: bool) -> None:
    written: list[str] = []
    sink = ConsoleSink(written.append, is_verbose=is_verbose)
    sink.handle(RunStarted(run_id="a", job="job.py", layout="pp", ranks=2, banner=LINES, total_steps=5))
    shown = written[0].splitlines()
    if is_verbose:
        assert shown == list(LINES)
        return
    extra = [line for line in shown if line.startswith(("warning", "note"))]
    assert len(extra) == 2 and len(shown) == BANNER_LINES + len(extra)
    assert [line.partition(":")[0] for line in shown if line not in extra] == [
        "run",
        "layout",
        "pipeline",
        "steps",
        "resumed",
    ]
    sink.handle(step(5))
    assert written[1].rstrip().endswith("ETA 0 ms"), "the number of steps is known from the start"


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_sinks_that_raise_get_one_note_each(broken: int) -> None:
    kept = Kept()
    stream = EventBus([*(Broken() for _ in range(broken)), kept])
    stream.emit(step(1))
    stream.emit(step(2))
    stream.close()
    assert [type(e).__name__ for e in kept.seen] == ["StepDone", *["Note"] * broken, "StepDone"]
    text = "writing to Broken failed, and is tried again with each event: no more"
    assert all(e.text == text for e in kept.seen if isinstance(e, Note))


def test_a_sink_that_works_again_says_so_once() -> None:
    class Sometimes(Kept):
        def handle(self, event: Event) -> None:
            if isinstance(event, StepDone) and event.step == 2:
                raise OSError("no space")
            super().handle(event)

    sink, kept = Sometimes(), Kept()
    stream = EventBus([sink, kept])
    for number in range(1, 6):
        stream.emit(step(number))
    notes = [e.text for e in kept.seen if isinstance(e, Note)]
    assert notes == [
        "writing to Sometimes failed, and is tried again with each event: no space",
        "writing to Sometimes works again",
    ]
    assert [e.step for e in sink.seen if isinstance(e, StepDone)] == [1, 3, 4, 5]


def test_lines_that_a_full_disk_refused_are_written_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write may write a part of a line."""
    write, room = os.write, [10**9]

    def write_with_limit(descriptor: int, data: bytes) -> int:
        number = write(descriptor, data[: room[0]])
        room[0] -= number
        if not number:
            raise OSError(28, "No space left on device")
        return number

    monkeypatch.setattr(os, "write", write_with_limit)
    run, kept = RunFolder(tmp_path), Kept()
    stream = EventBus([JsonlSink(run), kept])
    stream.emit(step(1))
    room[0] = 300
    for number in range(2, 6):
        stream.emit(step(number))
    room[0] = 10**9
    stream.emit(step(6))
    stream.close()
    assert [record["step"] for record in iter_records(run.events) if record["event"] == "StepDone"] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert [record["step"] for record in iter_records(run.metrics)] == [1, 2, 3, 4, 5, 6]
    assert "writing to events.jsonl and metrics.jsonl works again" in [e.text for e in kept.seen if isinstance(e, Note)]


def test_lines_that_are_lost_on_a_full_disk_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_MAX_UNWRITTEN_LINES", 4)
    write, is_full = os.write, [True]

    def write_unless_full(descriptor: int, data: bytes) -> int:
        if is_full[0]:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_unless_full)
    run = RunFolder(tmp_path)
    sink = JsonlSink(run)
    for number in range(1, 6):
        with pytest.raises(OSError, match="No space"):
            sink.handle(step(number))
    is_full[0] = False
    sink.close()
    records = list(iter_records(run.events))
    assert [record["step"] for record in records if record["event"] == "StepDone"] == [1, 2]
    assert [record["text"] for record in records if record["event"] == "Note"] == [
        "6 lines of the run's records are lost: the disk was full for too long"
    ]


def test_nobody_is_left_to_hear_and_the_run_goes_on() -> None:
    stream = EventBus([Broken(), Broken()])
    stream.emit(step(1))
    stream.emit(step(2))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    kept, sinks = Kept(), [JsonlSink(RunFolder(tmp_path)) for _ in range(2)]
    full = os.open("/dev/full", os.O_WRONLY)
    for sink in sinks:
        os.dup2(full, sink._events)
    os.close(full)
    EventBus([*sinks, kept]).emit(step(1))
    assert sum("No space left" in e.text for e in kept.seen if isinstance(e, Note)) == 2


def test_a_write_cut_short_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, write = JsonlSink(RunFolder(tmp_path)), os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[: len(data) // 2]))
    with pytest.raises(OSError, match="No space"):
        sink.handle(step(1))


def test_each_event_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, writes, write = JsonlSink(RunFolder(tmp_path)), [], os.write
    monkeypatch.setattr(os, "write", lambda handle, data: (writes.append(data), write(handle, data))[1])
    sink.handle(Note(text="日本\u2028语\n" * 2000))
    assert len(writes) == 1
    assert writes[0].count(b"\n") == 1


def test_a_torn_line_does_not_swallow_the_next_attempts_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1), step(2))
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    assert [r["step"] for r in iter_records(run.metrics)] == [1, 2]
    record(run, step(3, loss=9.0), step(4))
    assert [(r["step"], r["loss"]) for r in iter_records(run.metrics)][2:] == [(3, 9.0), (4, 2.1034)]


def test_what_is_not_finite_is_still_json(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1, loss=math.nan), step(2, loss=math.inf))
    for line in run.metrics.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("file", ["plan.json", "env.json", "answer-verify.json", "events.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize("text", ["", "{", "null", "[]", "7", '{"verdict": null}', '{"step": "a", "loss": []}', "\x00"])
def test_a_page_of_a_broken_run(tmp_path: Path, file: str, text: str) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1), step(2))
    with (tmp_path / file).open("a" if file.endswith("l") else "w") as out:
        out.write(text)
    assert "<h2>Curves</h2>" in run_page(run)


def test_a_page_of_an_empty_folder(tmp_path: Path) -> None:
    assert "not started" in run_page(RunFolder(tmp_path))


def test_a_step_done_again_replaces_the_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, step(1, loss=5.0), step(2, loss=6.0), RunStarted(run_id="r", job="j", layout="ddp", ranks=2))
    record(run, RunStarted(run_id="r", job="j", layout="ddp", ranks=2, resumed_from=1), step(2, loss=7.0))
    text = run_page(run)
    assert "step 2: 7<" in text
    assert "step 2: 6<" not in text
    assert "resumed at step 1" in text


def test_one_bad_value_among_many_is_marked(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    record(run, *(step(n, loss=math.nan if n == 777 else 1.0 + n % 7) for n in range(1, 3001)))
    text = run_page(run)
    assert "step 777: nan" in text
    assert len(text) < 200_000


def test_nothing_of_the_users_is_markup(tmp_path: Path) -> None:
    run, bad = RunFolder(tmp_path), "<script>alert('é')</script>"
    record(
        run,
        RunStarted(run_id=bad, job=bad, layout=bad, ranks=2, banner=(bad,)),
        step(1, terms={bad: 1.0, "b": 2.0}),
        EvalDone(step=1, split="eval", metrics={bad: 1.0}, samples=1, seconds=1.0, extra={bad: bad}),
        Note(text=bad),
    )
    (tmp_path / "env.json").write_text(json.dumps({bad: bad}))
    (tmp_path / "config.toml").write_text(f'{bad} = "{bad}"  # {bad}\n')
    text = run_page(run)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "http" not in text
