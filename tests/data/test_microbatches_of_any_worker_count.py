"""The loader gives the same microbatches for any number of replicas and data workers and any kind of data."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from paceline.data.loader import make_loader, read_eval_microbatches
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.data.workers import guard_worker_death
from paceline.errors import DataError, JobError
from paceline.launch.agent.signals import STOP_SIGNALS

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Noisy(Dataset[Any]):
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> Any:
        if index >= 45:
            raise IndexError(index)
        return index, random.random(), np.random.rand(), torch.rand(2)


class Stream(IterableDataset[Any]):
    def __init__(self, drift: bool = False) -> None:
        self.drift, self.times = drift, 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        for index in range(45):
            yield torch.tensor(index + (100 * self.times if self.drift else 0))


def read(
    data: Any, *, replicas: int, workers: int = 0, steps: int = 6, cursor: Cursor | None = None, **more: Any
) -> dict[Any, Any]:
    """What all replicas together read, by step and microbatch."""
    found = {}
    for replica in range(replicas):
        cut = BatchPartition(global_batch_size=12, micro_batch_size=5, replica=replica, replicas=replicas)
        options = {"order": None, "collate": None, **more}
        feed = make_loader(data=data, seed=3, partition=cut, cursor=cursor or Cursor(), workers=workers, **options)
        with closing(feed):
            for _, given in zip(range(steps), feed, strict=False):
                for micro in given.micro:
                    parts = micro.data if isinstance(micro.data, list) else [micro.data]
                    found[given.batch.next_cursor.step, micro.index] = (
                        micro.indices,
                        [part.tolist() for part in parts],
                    )
    return found


@pytest.mark.parametrize(("replicas", "workers"), [(2, 0), (3, 1), (4, 4)])
def test_replicas_and_workers_change_nothing(replicas: int, workers: int) -> None:
    assert read(Noisy(), replicas=replicas, workers=workers) == read(Noisy(), replicas=1)


def test_a_resume_in_the_middle_reads_the_rest() -> None:
    whole = read(Noisy(), replicas=1, steps=9)
    rest = read(Noisy(), replicas=2, steps=6, cursor=Cursor(epoch=0, position=36, samples=36, step=3))
    assert rest == {key: value for key, value in whole.items() if key[0] > 3}


def test_epochs_differ_and_each_holds_every_sample() -> None:
    found = read(Noisy(), replicas=2, steps=8)
    first = [i for (step, _), (indices, _) in sorted(found.items()) if step <= 4 for i in indices]
    second = [i for (step, _), (indices, _) in sorted(found.items()) if step > 4 for i in indices]
    assert sorted(first) == sorted(second) == list(range(45)) and first != second


def test_streams_are_the_same_for_any_number_of_replicas() -> None:
    assert read(Stream(), replicas=3) == read(Stream(), replicas=1)
    assert len(read(Stream(), replicas=1)) == 17


def test_a_stream_that_differs_between_two_readings_is_found() -> None:
    stream, cut = Stream(drift=True), BatchPartition(global_batch_size=12, micro_batch_size=6)
    feed = make_loader(data=stream, collate=None, order=None, seed=0, partition=cut, cursor=Cursor())
    given = next(iter(feed))
    again = make_loader(data=stream, collate=None, order=None, seed=0, partition=cut, cursor=given.batch.next_cursor)
    again.restore(feed.state())
    with pytest.raises(DataError, match="differs"):
        next(iter(again))


def test_a_data_loader_keeps_its_settings() -> None:
    loader = DataLoader(
        Noisy(),
        batch_size=7,
        sampler=SequentialSampler(Noisy()),
        collate_fn=lambda rows: [torch.tensor([r[0] for r in rows])],
    )
    found = read(loader, replicas=2)
    assert found[1, 0] == ((0, 1, 2, 3, 4), [[0, 1, 2, 3, 4]])


def test_a_sampler_of_ones_own_is_an_order() -> None:
    sampler = WeightedRandomSampler([1.0] * 45, num_samples=20, replacement=True)
    assert read(Noisy(), replicas=3, order=sampler) == read(Noisy(), replicas=1, order=sampler)
    assert read(Noisy(), replicas=1, order=lambda n, epoch, seed: range(n))[1, 0][0] == (0, 1, 2, 3, 4)


def test_evaluation_reads_each_sample_once() -> None:
    for replicas in (1, 2, 4, 7):
        indices = [
            i
            for r in range(replicas)
            for micro in read_eval_microbatches(
                data=Noisy(), collate=None, batch_size=8, replica=r, replicas=replicas, seed=0
            )
            for i in micro.indices
        ]
        assert sorted(indices) == list(range(45))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_sample_is_named_with_its_line(workers: int) -> None:
    class Bad(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise KeyError("label of 7")
            return index

    with pytest.raises(DataError, match=r"reading sample 7 failed: KeyError") as caught:
        read(Bad(), replicas=1, workers=workers)
    assert "test_microbatches_of_any_worker_count.py" in caught.value.where and "raise KeyError" in caught.value.where


def test_what_can_not_be_read_is_refused() -> None:
    for data, word in (([], "empty"), (3, "neither")):
        with pytest.raises(JobError, match=word):
            read(data, replicas=1)
    with pytest.raises(JobError, match="own"):
        read(DataLoader(Noisy(), batch_sampler=[[0, 1]]), replicas=1)


LEFT_OPEN = """
import sys, time, torch
from paceline.data.loader import make_loader
from paceline.data.types import BatchPartition
from paceline.data.order.cursor import Cursor

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        if index > 50: time.sleep({sleep})
        return torch.tensor(index)

partition = BatchPartition(global_batch_size=4, micro_batch_size=2)
feed = make_loader(data=Slow(), collate=None, order="sequential", seed=0, partition=partition, cursor=Cursor(), workers=1)
steps = iter(feed)
for _ in range({steps}): next(steps)
sys.kept = feed, steps
"""


@pytest.mark.parametrize(("steps", "sleep"), [(1, 0), pytest.param(12, 3600, marks=pytest.mark.soak)])
def test_a_feed_left_open_does_not_hold_the_interpreter(steps: int, sleep: int) -> None:
    script = LEFT_OPEN.format(steps=steps, sleep=sleep)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_data_loaders_own_worker_settings_reach_the_workers() -> None:
    class Marked(Noisy):
        mark = 0

        def __getitem__(self, index: int) -> Any:
            return self.mark

    def start(number: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None and info.id == number
        info.dataset.mark = 7

    loader = DataLoader(
        Marked(), batch_size=4, num_workers=2, worker_init_fn=start, prefetch_factor=3, timeout=30,
        persistent_workers=True, pin_memory=False, multiprocessing_context="fork",
    )  # fmt: skip
    found = read(loader, replicas=2)
    assert {value for _, (values,) in found.values() for value in values} == {7}


def test_data_workers_outlive_every_signal_that_asks_their_rank_to_stop() -> None:
    class Deaf(Noisy):
        def __getitem__(self, index: int) -> Any:
            for number in STOP_SIGNALS:
                os.kill(os.getpid(), number)
            told = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
            ignored = int(re.findall(r"SigIgn:\s*([0-9a-f]+)", told)[0], 16)
            return int(not any(ignored >> number - 1 & 1 for number in STOP_SIGNALS))  # by a program that it starts

    found = read(DataLoader(Deaf(), batch_size=4, num_workers=1), replicas=1, steps=2)
    assert {value for _, (values,) in found.values() for value in values} == {1}


def test_a_data_worker_that_leaves_is_named_though_its_memory_goes_first() -> None:
    class Leaving(Noisy):
        def __getitem__(self, index: int) -> Any:
            if torch.utils.data.get_worker_info() is not None:
                raise SystemExit(0)
            return index

    with pytest.raises(DataError, match="a data worker died"):
        read(DataLoader(Leaving(), batch_size=4, num_workers=2), replicas=1)

    def sent() -> Iterator[int]:
        yield 1
        raise FileNotFoundError(2, "No such file or directory")

    given = guard_worker_death(sent())
    assert next(given) == 1
    with pytest.raises(DataError, match="a data worker died: the data that it had read is lost"):
        next(given)


def test_a_worker_init_that_splits_a_stream_by_workers_loses_nothing() -> None:
    class Range(IterableDataset[Any]):
        start, stop = 0, 45

        def __iter__(self) -> Iterator[Any]:
            return (torch.tensor(i) for i in range(self.start, self.stop))

    def narrow(number: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        share = -(-45 // info.num_workers)
        info.dataset.start, info.dataset.stop = info.id * share, min(45, (info.id + 1) * share)

    loader = DataLoader(Range(), batch_size=4, num_workers=3, worker_init_fn=narrow)
    assert read(loader, replicas=2) == read(Range(), replicas=1)


def test_what_of_a_data_loader_is_not_kept_is_said_or_refused() -> None:
    cut = BatchPartition(global_batch_size=12, micro_batch_size=6)

    def notes(**options: Any) -> str:
        loader = DataLoader(Noisy(), batch_size=4, **options)
        feed = make_loader(data=loader, collate=None, order=None, seed=0, partition=cut, cursor=Cursor())
        return " ".join(feed.notes)

    assert "--data.drop_last true" in notes(drop_last=True)
    assert "generator is not used" in notes(shuffle=True, generator=torch.Generator())
    assert "spawn is ignored" in notes(num_workers=1, multiprocessing_context="spawn")
    assert "DistributedSampler is replaced" in notes(sampler=DistributedSampler(Noisy(), num_replicas=2, rank=0))

    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([1, 2])

    for loader, word in (
        (DataLoader(Noisy(), batch_size=None), "whole batches"),
        (Own(Noisy()), "with its own __iter__"),
    ):
        with pytest.raises(JobError, match=word):
            make_loader(data=loader, collate=None, order=None, seed=0, partition=cut, cursor=Cursor())


def test_an_evaluation_keeps_a_loaders_sampler() -> None:
    loader = DataLoader(Noisy(), batch_size=4, sampler=SubsetRandomSampler([3, 5, 8, 13, 21]))
    indices = [
        i
        for replica in range(2)
        for micro in read_eval_microbatches(
            data=loader, collate=None, batch_size=2, replica=replica, replicas=2, seed=0
        )
        for i in micro.indices
    ]
    assert sorted(indices) == [3, 5, 8, 13, 21]


def test_the_last_step_of_a_stream_ends_its_epoch() -> None:
    cut = BatchPartition(global_batch_size=12, micro_batch_size=6)
    feed = make_loader(data=Stream(), collate=None, order=None, seed=0, partition=cut, cursor=Cursor())
    after = [given.batch.next_cursor for _, given in zip(range(4), feed, strict=False)]
    assert [(one.epoch, one.position, one.samples) for one in after] == [
        (0, 12, 12),
        (0, 24, 24),
        (0, 36, 36),
        (1, 0, 45),
    ]
