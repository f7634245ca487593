"""Additional sinks: a resume shows one curve, and no sink can end a run."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.events import Event, EventBus, RunStarted, StepDone
from paceline.reporting.sinks.sink_registry import make_sinks
from paceline.run_folder.run_folder import RunFolder


def attempt(
    run: RunFolder, steps: range, *, loss: float, resumed_from: int | None, names: tuple[str, ...]
) -> list[str]:
    sinks, notes = make_sinks(names, run=run)
    stream = EventBus(sinks)
    stream.emit(RunStarted(run_id="r", job="j", layout="ddp", ranks=2, resumed_from=resumed_from))
    for number in steps:
        stream.emit(StepDone(step=number, epoch=0.0, samples=number, loss=loss))
    stream.close()
    return notes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("resumed_from", "expected"), [(5, 5 * [1.0] + 4 * [2.0]), (None, 4 * [2.0])])
def test_steps_done_again_are_one_curve_in_tensorboard(
    tmp_path: Path, resumed_from: int | None, expected: list[float]
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, names, first = RunFolder(tmp_path), ("tensorboard",), (resumed_from or 0) + 1
    attempt(run, range(1, 9), loss=1.0, resumed_from=None, names=names)
    for number, file in enumerate(sorted((tmp_path / "tb").iterdir())):
        file.rename(file.with_name(f"events.out.tfevents.{number}.first"))  # two attempts within a second sort alike
    attempt(run, range(first, first + 4), loss=2.0, resumed_from=resumed_from, names=names)
    seen = EventAccumulator(str(tmp_path / "tb"))
    seen.Reload()
    scalars = seen.Scalars("loss")
    assert [scalar.step for scalar in scalars] == list(range(1, first + 4))
    assert [scalar.value for scalar in scalars] == expected


class FakeRun:
    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.logged, self.finished = given, [], False

    def log(self, numbers: dict[str, float], *, step: int) -> None:
        self.logged.append((step, numbers["loss"]))

    def finish(self) -> None:
        self.finished = True


def test_wandb_goes_on_with_the_run_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeRun] = []
    module: Any = types.ModuleType("wandb")
    module.init = lambda **given: made.append(FakeRun(given)) or made[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = RunFolder(tmp_path / "job" / "one")
    assert attempt(run, range(1, 3), loss=1.0, resumed_from=None, names=("wandb",)) == []
    assert made[0].logged == [(1, 1.0), (2, 1.0)]
    assert made[0].finished
    assert (made[0].given["project"], made[0].given["id"], made[0].given["resume"]) == ("job", "one", "allow")


def test_a_sink_that_cannot_start_is_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise RuntimeError("no API key configured")

    module: Any = types.ModuleType("wandb")
    module.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", module)
    sinks, notes = make_sinks(["jsonl", "wandb"], run=RunFolder(tmp_path))
    assert [type(sink).__name__ for sink in sinks] == ["JsonlSink"]
    assert notes == ["wandb could not start and is left out: RuntimeError: no API key configured"]
    for sink in sinks:
        sink.close()


def test_a_sink_that_is_asked_for_and_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no module named"):
        make_sinks(["no_such_package:Sink"], run=RunFolder(tmp_path))


def test_a_sink_that_fails_in_the_middle_gets_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        def __init__(self) -> None:
            self.seen: list[Event] = []

        def handle(self, event: Event) -> None:
            self.seen.append(event)

        def close(self) -> None:
            pass

    module: Any = types.ModuleType("wandb")
    module.init = lambda **_: types.SimpleNamespace(finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sinks, _ = make_sinks(["wandb"], run=RunFolder(tmp_path))
    kept = Kept()
    stream = EventBus([*sinks, kept])
    for number in (1, 2):
        stream.emit(StepDone(step=number, epoch=0.0, samples=number, loss=1.0))
    assert [type(event).__name__ for event in kept.seen] == ["StepDone", "Note", "StepDone"]
