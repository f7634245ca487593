"""Where the time of a run went: each second of it belongs to one kind, and only steps that count are useful."""

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.reporting.goodput_section import read_goodput, show_goodput
from paceline.reporting.run_history import History
from paceline.run_folder.run_folder import RunFolder


def started(time: float, *, attempt: int, resumed_from: int = 0) -> dict[str, Any]:
    return {"event": "RunStarted", "time": time, "attempt": attempt, "resumed_from": resumed_from}


def step(number: int, time: float, **seconds: float) -> dict[str, Any]:
    return {"event": "StepDone", "step": number, "time": time, "step_seconds": 1.0, **seconds}


def restarted(time: float, *, attempt: int, resumed: int, repeated: int, seconds: float) -> dict[str, Any]:
    return {
        "event": "Restarted", "time": time, "attempt": attempt, "reason": "rank 1 killed", "failed_step": resumed + repeated,
        "resumed_step": resumed, "repeated_steps": repeated, "seconds": seconds, "source": "disk",
    }  # fmt: skip


def history(folder: Path, *events: dict[str, Any]) -> History:
    return History(run=RunFolder(folder), steps={}, events=list(events), num_unreadable={}, num_discarded=0)


KILLED = [  # a fault at 105.5, in step 6; a checkpoint of step 3
    started(100.0, attempt=1),
    *(step(n, 100.0 + n) for n in range(1, 6)),
    started(106.2, attempt=2, resumed_from=3),
    restarted(106.3, attempt=2, resumed=3, repeated=3, seconds=0.8),
    *(step(n, 103.3 + n) for n in range(4, 11)),
]


def test_a_restart_and_the_repeated_steps_are_lost(tmp_path: Path) -> None:
    budget = read_goodput(history(tmp_path, *KILLED))
    assert budget is not None
    assert budget.total == pytest.approx(13.3)  # from 100.0 to 113.3
    assert budget.losses["restarts"] == pytest.approx(0.8)
    assert budget.losses["repeated steps"] == pytest.approx(3.0)  # steps 4 and 5, and half of step 6 counted as a whole
    assert budget.useful == pytest.approx(9.5) and budget.goodput == pytest.approx(9.5 / 13.3)


def test_saves_evaluations_and_long_waits_are_lost(tmp_path: Path) -> None:
    events = [
        started(0.0, attempt=1),
        step(1, 1.0),
        step(2, 2.5, checkpoint_seconds=0.5),
        step(4, 5.5, evaluation_seconds=0.5),  # a mean of two steps
        step(5, 9.5, step_seconds=4.0),
        *(step(n, 4.5 + n) for n in range(6, 10)),
        {"event": "CheckpointSaved", "step": 9, "time": 14.0, "seconds": 0.5},
    ]
    budget = read_goodput(history(tmp_path, *events))
    assert budget is not None and budget.total == pytest.approx(14.0)
    lost = {name: seconds for name, seconds in budget.losses.items() if seconds}
    assert lost == pytest.approx({"saves": 0.5, "evaluation": 1.0, "waits": 3.0})


def test_the_time_between_two_commands_does_not_count(tmp_path: Path) -> None:
    events = [started(0.0, attempt=1), step(1, 1.0), started(5000.0, attempt=2, resumed_from=1), step(2, 5001.0)]
    budget = read_goodput(history(tmp_path, *events))
    assert budget is not None and budget.total == pytest.approx(2.0) and budget.goodput == 1.0


def test_the_start_counts_from_the_request(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt-1").mkdir(parents=True)
    request = tmp_path / "logs" / "attempt-1" / "request.json"
    request.touch()
    os.utime(request, (97.0, 97.0))
    budget = read_goodput(history(tmp_path, started(100.0, attempt=1), step(1, 101.0)))
    assert budget is not None and budget.losses["start"] == 3.0 and budget.total == 4.0


def test_the_section_is_a_waterfall_and_is_shown_after_a_restart_only(tmp_path: Path) -> None:
    shown = show_goodput(history(tmp_path, *KILLED))
    assert "goodput 71.4%" in shown and "9.5 of 13.3 s" in shown and "restarts" in shown and "evaluation" not in shown
    assert show_goodput(history(tmp_path, started(0.0, attempt=1), step(1, 1.0))) == ""
    assert show_goodput(history(tmp_path)) == ""
