"""The end of an epoch: its short batch, and data that can be read only once."""

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch

from paceline.data.loader import make_loader, read_eval_microbatches
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.errors import DataError, UsageError
from tests.data.test_microbatches_of_any_worker_count import Noisy, Stream, read

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_an_epoch_shorter_than_a_batch_is_not_left_out_altogether() -> None:
    def first(data: Any, size: int) -> int:
        cut = BatchPartition(global_batch_size=size, micro_batch_size=5, drop_last=True)
        with closing(make_loader(data=data, seed=3, partition=cut, cursor=Cursor(), order=None, collate=None)) as feed:
            return next(iter(feed)).batch.num_samples

    assert first(Noisy(), 45) == first(Stream(), 45) == 45
    with pytest.raises(UsageError, match="an epoch has 45 samples, but a global batch has 46") as refused:
        first(Noisy(), 46)
    assert "--data.drop_last false" in refused.value.hint
    with pytest.raises(DataError, match="shorter than a global batch of 46, which data"):
        first(Stream(), 46)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("make", [Noisy, Stream])
def test_samples_and_steps_are_counted_over_all_epochs(make: Any, drop_last: bool) -> None:
    cut = BatchPartition(global_batch_size=12, micro_batch_size=5, drop_last=drop_last)
    total, turns = 0, 0
    with closing(make_loader(data=make(), seed=3, partition=cut, cursor=Cursor(), order=None, collate=None)) as feed:
        for steps, given in enumerate(islice(feed, 10), 1):
            batch = given.batch
            assert (batch.cursor.samples, batch.cursor.step) == (total, steps - 1)
            total += sum(micro.num_samples for micro in batch.micro)
            assert (batch.next_cursor.samples, batch.next_cursor.step) == (total, steps)
            turns += batch.micro[0].start == 0
    assert turns == (4 if drop_last else 3)  # an epoch of 45 by 12 has 3 or 4 steps


def _rows() -> Iterator[Any]:
    yield from map(torch.tensor, range(45))


@pytest.mark.parametrize(("replicas", "workers"), [(1, 0), (1, 1), (2, 0), (2, 2)])
def test_a_function_that_gives_a_generator_is_called_for_each_epoch(replicas: int, workers: int) -> None:
    found = read(lambda: _rows(), replicas=replicas, workers=workers, steps=8)
    for epoch in (range(1, 5), range(5, 9)):
        values = [x for (step, _), (_, [part]) in sorted(found.items()) if step in epoch for x in part]
        assert values == list(range(45))
    assert [sum(len(m.indices) for m in _evaluated(lambda: map(torch.tensor, range(9)))) for _ in range(2)] == [9, 9]


def _evaluated(data: Any) -> Iterator[Any]:
    return read_eval_microbatches(data=data, collate=None, batch_size=4, replica=0, replicas=1, seed=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_itself_is_read_once(workers: int) -> None:
    assert len(read(_rows(), replicas=1, workers=workers, steps=4)) == 11
    with pytest.raises(DataError, match="can be read only once: epoch 2") as caught:
        read(_rows(), replicas=1, workers=workers, steps=5)
    assert "without calling it" in caught.value.hint
