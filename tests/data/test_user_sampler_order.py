"""A user's own sample order is compared across ranks, kept in the checkpoint and named by verify."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from paceline.data.loader import BatchLoader, make_loader, read_eval_microbatches
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.errors import DesyncError, ResumeError
from tests.conftest import SMALL_JOB, Shop

DATA = TensorDataset(torch.arange(40.0))
UNSEEDED = "lambda num_samples, epoch, seed: np.random.default_rng().permutation(num_samples).tolist()"


class Drawn(Sampler[int]):
    """Draws from a generator that nobody seeds, or from torch's own."""

    def __init__(self, *, unseeded: bool) -> None:
        self.unseeded = unseeded

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        drawn = np.random.default_rng().permutation(40) if self.unseeded else torch.randperm(40)
        return iter(drawn.tolist())


def seeded(num_samples: int, epoch: int, seed: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


def unseeded(num_samples: int, epoch: int, seed: int) -> Any:
    return np.random.default_rng().permutation(num_samples)


def fed(
    order: Any, *, other: str = "", cursor: Cursor | None = None, data: Any = DATA, workers: int = 0
) -> BatchLoader:
    """The feed of rank 0 of two, where rank 1 says `other` of its order, or the same."""
    return make_loader(
        data=data,
        collate=None,
        order=order,
        seed=0,
        partition=BatchPartition(global_batch_size=8, micro_batch_size=4, replicas=2),
        cursor=cursor or Cursor(),
        workers=workers,
        gather_json=lambda mine: [mine, other if other and isinstance(mine, str) else mine],
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_is_compared_at_the_start_of_each_epoch(workers: int) -> None:
    apart = fed(seeded, other="0", workers=workers)
    with (
        closing(apart),
        pytest.raises(DesyncError, match="order= gives a different order on rank 1 than on rank 0, in epoch 0"),
    ):
        next(iter(apart))
    said: list[str] = []
    feed = fed(seeded, workers=workers)
    feed._gather_json = lambda mine: [mine, (isinstance(mine, str) and said.append(mine)) or mine]  # type: ignore[attr-defined]
    with closing(feed):
        for _ in zip(range(12), feed, strict=False):
            pass
    assert len(said) == len(set(said)) == 3, "five steps make an epoch"
    for own in (None, "sequential"):
        next(iter(fed(own, other="0")))  # which no rank can have otherwise, so that nothing is asked


def test_an_epoch_is_gone_on_with_in_its_own_order_alone() -> None:
    begun = {}
    for name, order in {"seeded": seeded, "unseeded": unseeded, "shuffled": None}.items():
        feed = fed(order)
        at = next(iter(feed)).batch.next_cursor
        begun[name] = feed.state()
    for name, order in {"seeded": seeded, "shuffled": None}.items():
        again = fed(order, cursor=at)
        again.restore(begun[name])
        next(iter(again))
        assert again.state() == begun[name]
    for name, order in [("unseeded", unseeded), ("seeded", None), ("shuffled", seeded)]:
        again = fed(order, cursor=at)
        again.restore(begun[name])
        with pytest.raises(ResumeError, match="order= gives a different order than this run began with"):
            next(iter(again))
    ended = Cursor(epoch=0, position=40, samples=40, step=5)  # the next epoch may have any
    again = fed(unseeded, cursor=ended)
    again.restore(begun["unseeded"])
    assert next(iter(again)).batch.next_cursor.epoch == 1


def test_a_sampler_of_an_evaluation_is_compared_before_it_is_read() -> None:
    def read(sampler: Drawn) -> list[int]:
        data = DataLoader(DATA, batch_size=4, sampler=sampler)
        made = read_eval_microbatches(
            data=data, collate=None, batch_size=4, replica=0, replicas=2, seed=0,
            gather_json=lambda m: [m, given(sampler) if isinstance(m, str) else m],
        )  # fmt: skip
        return [index for micro in made for index in micro.indices]

    def given(sampler: Drawn) -> str:
        return fed(None, data=DataLoader(DATA, sampler=sampler))._order.checksum_or_name(0)  # type: ignore[attr-defined,no-any-return]

    assert len(read(Drawn(unseeded=False))) == 20
    with pytest.raises(DesyncError, match="the DataLoader's sampler of eval_data gives a different order on rank 1"):
        read(Drawn(unseeded=True))


@pytest.mark.soak
def test_unseeded_orders_end_a_run_and_are_named_by_verify(shop: Shop) -> None:
    job = "import numpy as np\n" + SMALL_JOB.replace("        max_grad_norm=1.0,\n", f"        order={UNSEEDED},\n")
    shop.write("job.py", job)
    ended = shop.train("two")
    assert ended.code == 1 and "order= gives a different order on rank 1 than on rank 0" in ended.text, ended.text
    assert shop.train("one", ranks=1, steps=3).code == 0
    refused = shop.train("one", ranks=1, steps=7)
    assert refused.code == 2 and "a different order than this run began with" in refused.text, refused.text
    assert shop.train("one", "--allow", "order", ranks=1, steps=7).code == 0
    found = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert found.code == 4 and "at the second call" in found.text, found.text
    apart = UNSEEDED.replace("default_rng()", "default_rng(int(os.environ['RANK']))")
    shop.write("job.py", job.replace(UNSEEDED, apart))
    found = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert found.code == 4 and "order= gives a different order on rank 1 than on rank 0" in found.text, found.text
