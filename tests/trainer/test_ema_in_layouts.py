"""`ema=` in layouts with unequal ranks: the ranks agree, and the saved average is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config.merge_settings import read_requested_settings
from paceline.config.task import Task
from paceline.trainer.diagnostics.replica_check import find_replica_mismatch
from paceline.trainer.saving.final_weights import write_final_weights
from paceline.trainer.setup.build_training_setup import TrainingSetup
from tests.end_to_end.forked_job_ranks import try_pair
from tests.end_to_end.refused_layout_models import job_of

pytestmark = pytest.mark.one_worker  # what they share is made once


def _sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(named), lr=0.1, momentum=0.9)


def _written(folder: Path, layout: str, *words: str, ranks: int) -> dict[str, torch.Tensor]:
    """The average of a run of two steps."""

    def then(built: TrainingSetup) -> None:
        assert find_replica_mismatch(built) is None
        write_final_weights(built, folder, step=2)

    folder.mkdir()
    asked = read_requested_settings(file=None, overrides=list(words))
    task = Task(verb="train", job="job.py", layout=layout, ranks=ranks, settings=asked.values, origins=asked.origins)
    told = try_pair(task, make=lambda: job_of(ema=0.5, optimizer=_sgd), folder=folder, then=then)
    assert told.state == "done", told.text
    return load_file(folder / "consolidated" / "model.safetensors")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return _written(tmp_path_factory.mktemp("ema") / "single", "single", ranks=1)


@pytest.mark.parametrize(("layout", "words"), [("pp", ["--place.stages=3,1"]), ("zero1", []), ("zero2", [])])
def test_the_average_of_unequal_ranks_is_that_of_one_process(
    tmp_path: Path, right: dict[str, torch.Tensor], layout: str, words: list[str]
) -> None:
    found = _written(tmp_path / "run", layout, *words, ranks=2)
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
