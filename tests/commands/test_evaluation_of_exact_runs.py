"""`evaluate` keeps the settings of exact mode that its layout supports, and drops the others."""

import pytest

from paceline.commands.common.execution import RunOptions
from paceline.commands.evaluate import build_evaluation_task
from paceline.config.task import Task

TENSOR = {"train.exact": True, "train.tensor_shards": 4, "place.replicate": ("head",)}
SEQUENCE = {"train.exact": True, "train.sequence_shards": 4}


@pytest.mark.parametrize(
    ("settings", "trained", "ranks", "evaluated", "kept"),
    [
        (TENSOR, "tp=2", 2, None, set(TENSOR)),
        (TENSOR, "tp=2", 2, "ddp", {"train.exact"}),
        (TENSOR, "tp=2", 2, "pp=2", {"train.exact"}),
        (TENSOR, "dp_shard=2,tp=2", 4, "tp=4", set()),
        (SEQUENCE, "cp=2", 2, None, set(SEQUENCE)),
        (SEQUENCE, "cp=2", 2, "cp=3", set()),
        (SEQUENCE, "cp=2", 2, "fsdp", set(SEQUENCE)),
    ],
)
def test_what_stays_of_exact_mode(
    settings: dict[str, object], trained: str, ranks: int, evaluated: str | None, kept: set[str]
) -> None:
    task = Task(verb="train", job="job.py", layout=trained, ranks=ranks, settings=dict(settings))
    ranks_asked = None if evaluated is None else int(evaluated.rpartition("=")[2] or 2) if "=" in evaluated else ranks
    found = build_evaluation_task(task, RunOptions(ranks=ranks_asked, layout=evaluated))
    assert set(found.settings) == kept
