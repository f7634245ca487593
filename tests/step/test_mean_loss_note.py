"""A run says of its first microbatch that the loss is no sum over samples, and asking changes no bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.loader import make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from tests.parallel.batchnorm.test_batchnorm import BATCH, MICRO, built, job_of


def mean(output: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1]), len(batch[1])


def summed(output: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def first_step(loss: Any, *, replicas: int, asks: bool) -> tuple[str, dict[str, Tensor]]:
    job = replace(job_of("plain"), loss=loss, forward=lambda model, batch: model(batch[0])[0])
    made = built(job, replicas, micro=MICRO)
    cut = BatchPartition(global_batch_size=BATCH, micro_batch_size=MICRO)
    feed = make_loader(data=job.train_data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor())
    contract = made.step.replica.contract
    if asks:
        contract.request_sum_check()
    try:
        made.step.run(next(iter(feed)))
        return contract.note, {name: value.clone() for name, value in made.model.state_dict().items()}
    finally:
        made.close()


def root(output: Any, batch: Any) -> Tensor:
    return torch.sqrt(F.cross_entropy(output, batch[1]))


def test_a_scalar_that_is_no_mean_over_samples_is_told_with_its_numbers() -> None:
    note, _ = first_step(root, replicas=1, asks=True)
    assert note.startswith("loss= returns a scalar that is not the mean over samples (") and "loss_over" in note
    assert first_step(lambda o, b: F.cross_entropy(o, b[1]), replicas=1, asks=True)[0] == ""


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mean_beside_a_count_is_told_and_a_sum_is_not(replicas: int) -> None:
    note, weights = first_step(mean, replicas=replicas, asks=True)
    assert "a mean with a count" in note and "reduction='sum'" in note
    assert first_step(summed, replicas=replicas, asks=True)[0] == ""
    silent, same = first_step(mean, replicas=replicas, asks=False)
    assert silent == "" and all(torch.equal(same[name], value) for name, value in weights.items())
