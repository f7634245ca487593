"""Under `cp` the first batch of each sequence length is tried before its first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.config.task import Task
from paceline.errors import LayoutError
from paceline.trainer.checks.parallel_checks import BatchLengthCheck
from tests.end_to_end.forked_job_ranks import try_pair
from tests.end_to_end.refused_layout_models import Tiny, job_of, rows
from tests.matrix.matrix_page import patterns, stands


class Long(Tiny):
    """Longer sequences are pooled."""

    def forward(self, ids: Tensor) -> Tensor:
        found = super().forward(ids)
        return found + found.mean(1, keepdim=True) if ids.shape[1] > 8 else found


def test_a_second_length_that_can_not_be_cut_is_refused(tmp_path: Path) -> None:
    task = Task(verb="train", job="job.py", layout="cp", ranks=2, settings={}, origins={})
    data = [*rows(6)[:8], *rows(16)[:8]]

    def make() -> Any:
        return job_of(Long, train_data=data, order="sequential", sequence={"0": 1, "1": 1})

    told = try_pair(task, make=make, folder=tmp_path)
    first = told.text.splitlines()[0]
    assert told.state == "refused" and first.startswith(
        "at a length of 16, which differs from the first batch, this model gives different outputs"
    ), told
    assert stands(first, patterns()) and "to do:" in told.text


def test_a_few_lengths_are_tried_once_each_and_leave_no_trace() -> None:
    seen: list[int] = []

    def tried(*, model: nn.Module, batch: Tensor) -> None:
        seen.append(len(batch))
        torch.rand(len(batch))
        assert model is not live and model.weight is live.weight
        if len(batch) == 9:
            raise LayoutError("it is odd.", hint="leave it out")

    live = nn.Linear(2, 2)
    lengths, drawn = BatchLengthCheck(live, tried, first_length=4), torch.get_rng_state()
    for length in (4, 5, 5, 4, 6, 5, 6):
        lengths(torch.zeros(length), length)
    with pytest.raises(LayoutError, match="at a length of 9, which differs from the first batch, it is odd"):
        lengths(torch.zeros(9), 9)
    lengths(torch.zeros(7), 7)
    assert seen == [5, 6, 9] and torch.equal(drawn, torch.get_rng_state())
