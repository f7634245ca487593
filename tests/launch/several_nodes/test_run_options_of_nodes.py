"""The options that choose the run are compared between nodes by what they mean."""

from pathlib import Path

import pytest

from paceline.commands.common.node_start import NodeStart
from paceline.config.task import Task
from paceline.nodes.node_place import NodePlace

PLACE = NodePlace(num_nodes=2, head_host="host0", port=29400, node=1)


def options(*, run: str = "", resume: str | None = None) -> dict[str, str]:
    """The options about the run among those that are compared."""
    task = Task(verb="train", job="job.py", ranks=2, nodes="2:host0", run=run)
    command = NodeStart(PLACE, task, node_counts=(2,), resume=resume)._read_facts().command
    return {name: command[name] for name in ("run folder", "resume") if name in command}


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("a", "b"):
        (tmp_path / "runs" / run / "checkpoints" / "step-00000010").mkdir(parents=True)
        (tmp_path / "runs" / run / "logs").mkdir()


def test_the_resumed_run_is_the_run_folder() -> None:
    assert options() == {} and options(run="runs/a") == {"run folder": "runs/a"}
    assert options(resume="runs/a") == options(run="runs/a", resume="runs/a") == options(run="runs/a")
    assert options(resume="runs/b") == {"run folder": "runs/b"}


def test_other_ways_to_resume_are_options_of_their_own() -> None:
    assert options(resume="") == {"resume": "the newest run"}
    assert options(run="runs/b", resume="runs/a") == {"run folder": "runs/b", "resume": "runs/a"}
    checkpoint = "runs/a/checkpoints/step-00000010"
    assert options(resume=checkpoint) == {"run folder": "runs/a", "resume": "step-00000010"}
