"""A run that `--layout auto` started resumes with all the choices made for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.commands.common.resume_command import build_resume_command
from paceline.config.task import Task
from paceline.measured_planning.auto_layout import ORIGIN, apply_layout, restore_auto_layout
from paceline.planner.search.layout_with_forecast import LayoutForecast

STAGES, MICRO = "place.stages", "train.micro_batch_size"


def asked(settings: dict[str, Any] | None = None, *, ranks: int = 3) -> Task:
    own = settings or {}
    origins = dict.fromkeys(own, "command line")
    return Task(verb="train", job="job.py", layout="auto", ranks=ranks, settings=own, origins=origins)


def begun(folder: Path, task: Task) -> Task:
    """The task that its first attempt leaves in its folder."""
    rung = LayoutForecast(
        layout="pp", family="pp", ranks=3, peak_bytes=1, parts={}, step_seconds=1.0,
        settings={MICRO: "8", STAGES: "1,2,1"},
    )  # fmt: skip
    chosen = apply_layout(replace(task, run=str(folder)), [rung])
    (folder / "task.json").write_text(json.dumps(chosen.as_json()))
    return chosen


def again(folder: Path, settings: dict[str, Any] | None = None, *, ranks: int = 3) -> Any:
    return restore_auto_layout(replace(asked(settings, ranks=ranks), run=str(folder), resume="newest"), quiet=True)


def test_its_stages_and_microbatches_are_those_it_had(tmp_path: Path, capsys: Any) -> None:
    first = begun(tmp_path, asked())
    found = again(tmp_path)
    assert found.layout == "pp" and found.settings == {MICRO: "8", STAGES: ["1", "2", "1"]} == json.loads(
        json.dumps(first.settings)
    )
    assert found.origins[STAGES] == found.origins[MICRO] == ORIGIN
    said = "auto: --layout pp --train.micro_batch_size 8 --place.stages 1,2,1, as in this run so far"
    assert said in capsys.readouterr().err
    assert build_resume_command(found) == build_resume_command(
        first
    ) and "--place.stages 1,2,1" in build_resume_command(found)
    (tmp_path / "task.json").write_text(json.dumps(found.as_json()))
    assert again(tmp_path).settings == found.settings


def test_what_is_typed_wins(tmp_path: Path) -> None:
    begun(tmp_path, asked({"train.steps": 4}))
    found = again(tmp_path, {STAGES: [2, 1, 1]})
    assert found.settings[STAGES] == [2, 1, 1] and found.origins[STAGES] == "command line"
    assert "train.steps" not in found.settings


def test_on_other_ranks_it_is_planned_again(tmp_path: Path) -> None:
    begun(tmp_path, asked())
    assert again(tmp_path, ranks=2) is None
