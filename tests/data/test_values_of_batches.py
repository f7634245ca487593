"""Values of batches: new random numbers in each epoch and microbatch, and the epoch that a dataset receives."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    default_collate,
)

from paceline.config.settings import Settings
from paceline.data.checksum import checksum
from paceline.data.leased_loader import RandomAccessLoader
from paceline.data.loader import make_loader, read_eval_microbatches
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.errors import DataError, DesyncError, JobError
from paceline.job import Job
from paceline.trainer.checks.evaluation_checks import data_length_notes
from paceline.trainer.setup.job_data import JobData

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SAMPLES = 20


class Drawing(Dataset[Any]):
    """A random number beside each index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand((), dtype=torch.float64))


class Counted(Dataset[Any]):
    """Plain indices."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index


class Told(Counted):
    """The epoch that it was told beside each index."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch


def as_given(rows: list[Any]) -> list[Any]:
    return rows


def with_number(rows: list[Any]) -> Any:
    return rows, float(torch.rand((), dtype=torch.float64))


def fed(
    data: Any,
    *,
    replicas: int = 1,
    workers: int = 0,
    epochs: int = 2,
    cursor: Cursor | None = None,
    seed: int = 5,
    **more: Any,
) -> dict[tuple[int, int, int], Any]:
    """The data of every microbatch of all replicas, by epoch, step in the run and place in the batch."""
    found = {}
    for replica in range(replicas):
        cut = BatchPartition(global_batch_size=8, micro_batch_size=2, replica=replica, replicas=replicas)
        options = {"collate": as_given, "order": None, **more}
        feed = make_loader(data=data, seed=seed, partition=cut, cursor=cursor or Cursor(), workers=workers, **options)
        with closing(feed):
            for given in feed:
                if given.batch.next_cursor.epoch == epochs:
                    break
                for micro in given.micro:
                    found[given.batch.next_cursor.epoch, given.batch.next_cursor.step, micro.index] = micro.data
    return found


@pytest.mark.parametrize(("replicas", "workers"), [(1, 0), (3, 0), (1, 2)])
def test_a_sample_has_other_random_numbers_in_each_epoch(replicas: int, workers: int) -> None:
    numbers: dict[tuple[int, int], float] = {}
    for (epoch, _, _), rows in fed(Drawing(), replicas=replicas, workers=workers).items():
        numbers |= {(epoch, index): value for index, value in rows}
    assert len(numbers) == 2 * SAMPLES, "each sample once an epoch"
    assert len(set(numbers.values())) == 2 * SAMPLES, "no number twice, in no epoch"
    alone = {(e, i): v for (e, _, _), rows in fed(Drawing()).items() for i, v in rows}
    assert numbers == alone, "the same numbers for any replicas and workers"


@pytest.mark.parametrize(("replicas", "workers"), [(1, 0), (3, 0), (1, 2)])
def test_a_collation_that_draws_has_other_numbers_in_each_microbatch(replicas: int, workers: int) -> None:
    found = fed(Counted(), replicas=replicas, workers=workers, collate=with_number)
    numbers = [value for _, value in found.values()]
    assert len(numbers) == 2 * SAMPLES // 2 and len(set(numbers)) == len(numbers)
    assert found == fed(Counted(), collate=with_number)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_collation_of_a_stream_that_draws_has_other_numbers_in_each_microbatch(replicas: int) -> None:
    """The last batch of the second epoch is where it ends, and not among them."""
    found = fed(lambda: iter(range(SAMPLES)), replicas=replicas, collate=with_number)
    numbers = [value for _, value in found.values()]
    assert len(numbers) == SAMPLES // 2 + 8 and len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("is_loader", [False, True])
def test_a_random_sampler_gives_another_order_in_each_epoch(is_loader: bool) -> None:
    sampler = RandomSampler(Counted(), replacement=True, num_samples=SAMPLES)
    data: Any = DataLoader(Counted(), sampler=sampler) if is_loader else Counted()
    more = {"collate": as_given} if is_loader else {"order": sampler}
    orders = []
    for replicas in (1, 3):
        found = fed(data, replicas=replicas, epochs=3, **more)
        orders.append([[i for place in sorted(found) if place[0] == e for i in found[place]] for e in range(3)])
    assert orders[0] == orders[1]
    assert all(len(order) == SAMPLES for order in orders[0])
    assert orders[0][0] != orders[0][1] != orders[0][2] != orders[0][0]


class Parts(IterableDataset[Any]):
    """A stream in two parts, with a random number in each sample."""

    num_shards = 2

    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.start, self.step, self.given = start, step, 0

    def shard(self, num_shards: int, index: int) -> "Parts":
        return Parts(index, num_shards)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.start, SAMPLES, self.step)[self.given :]:
            self.given += 1
            yield index, float(torch.rand((), dtype=torch.float64))


def drawing(kind: str) -> dict[str, Any]:
    """What reads each kind of draw of a feed, for `fed`."""
    return {
        "samples": {"data": Drawing(), "order": "sequential"},
        "collation": {"data": Counted(), "collate": with_number, "order": "sequential"},
        "shuffled": {"data": Counted(), "order": None},
        "a sampler": {"data": Counted(), "order": RandomSampler(Counted())},
        "a stream's collation": {"data": lambda: iter(range(SAMPLES)), "collate": with_number},
        "a stream in parts": {"data": Parts()},
    }[kind]


@pytest.mark.parametrize(
    "kind", ["samples", "collation", "shuffled", "a sampler", "a stream's collation", "a stream in parts"]
)
def test_all_that_is_drawn_follows_the_runs_seed(kind: str) -> None:
    one, again, other = (fed(**drawing(kind), epochs=1, seed=seed) for seed in (5, 5, 6))
    assert one and one == again
    assert one.keys() == other.keys() and all(one[place] != other[place] for place in one), "no draw is the same"


def wrapped(name: str) -> Any:
    told = Told()
    return {
        "itself": lambda: told,
        "subset": lambda: Subset(told, range(SAMPLES)),
        "of two": lambda: ConcatDataset([Subset(told, range(8)), Subset(Told(), range(8, SAMPLES))]),
        "stacked": lambda: Pairs(StackDataset(told, Counted())),
        "by name": lambda: Pairs(StackDataset(a=told, b=Counted())),
        "loader": lambda: DataLoader(Subset(told, range(SAMPLES)), num_workers=1),
    }[name]()


class Pairs(Dataset[Any]):
    """A wrapper of the user's own, which calls what it holds `dataset`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        found = self.dataset[index]
        return found[0] if isinstance(found, tuple) else found["a"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["itself", "subset", "of two", "stacked", "by name", "loader"])
def test_a_dataset_is_told_the_epoch_of_each_microbatch(name: str, workers: int) -> None:
    found = fed(wrapped(name), workers=workers, replicas=2, epochs=3)
    rows = [(place[0], *row) for place, part in found.items() for row in part]
    assert sorted(rows) == [(epoch, index, epoch) for epoch in range(3) for index in range(SAMPLES)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_in_the_middle_of_an_epoch_tells_it(workers: int) -> None:
    cursor = Cursor(epoch=2, position=8, samples=48, step=7)
    found = fed(Told(), workers=workers, cursor=cursor, epochs=4)
    told = [(place[0], epoch) for place, part in found.items() for _, epoch in part]
    assert sorted(told) == [(2, 2)] * (SAMPLES - 8) + [(3, 3)] * SAMPLES


class Growing(Counted):
    """Longer each time it is asked, or from the second epoch on."""

    def __init__(self, *, always: bool) -> None:
        self.always, self.asked, self.epoch = always, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        self.asked += 1
        return SAMPLES + (self.asked if self.always else 4 * self.epoch)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_length_that_is_not_the_same_is_refused(workers: int) -> None:
    with pytest.raises(JobError, match=r"len\(\) of train_data changes from call to call: 21 samples, then 22"):
        fed(Growing(always=True), workers=workers)
    with pytest.raises(DataError, match="train_data has 24 samples in epoch 1, but had 20 at the start"):
        fed(Growing(always=False), workers=workers)


class Own(Counted):
    """What one rank has of 20 samples, shifted by `first`; with numbers of a generator of its own if it draws."""

    def __init__(self, first: int = 0, length: int = SAMPLES, draws: bool = False) -> None:
        self.first, self.length = first, length
        self.generator = torch.Generator().manual_seed(first) if draws else None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        drawn = 0.0 if self.generator is None else float(torch.rand((), generator=self.generator))
        return index + self.first, drawn


def together(mine: Any, other: Any, *, evaluates: bool) -> None:
    """The feeds of two ranks, one after the other: each question is answered with what the other has said."""
    said: list[Any] = []

    def read(data: Any, agree: Any) -> None:
        if evaluates:
            list(
                read_eval_microbatches(
                    data=data, collate=as_given, batch_size=4, replica=0, replicas=2, seed=5, gather_json=agree
                )
            )
        else:
            cut = BatchPartition(global_batch_size=8, micro_batch_size=2, replicas=2)
            options: Any = {"collate": as_given, "order": None, "seed": 5, "partition": cut, "cursor": Cursor()}
            with closing(make_loader(data=data, gather_json=agree, **options)) as feed:
                next(iter(feed))

    def tell(value: Any) -> list[Any]:
        said.append(value)
        return [value, value]

    read(other, tell)
    said.append(True)  # where samples differ, whether this one's are the same twice
    turn = iter(said)
    read(mine, lambda value: [value, next(turn)])


@pytest.mark.parametrize("evaluates", [False, True])
def test_ranks_with_other_data_are_refused_by_name(evaluates: bool) -> None:
    name = "eval_data" if evaluates else "train_data"
    together(Own(), Own(), evaluates=evaluates)
    together(Own(draws=True), Own(3, draws=True), evaluates=evaluates)
    with pytest.raises(DesyncError, match=f"{name} has 19 samples on rank 1 and 20 on rank 0"):
        together(Own(), Own(length=19), evaluates=evaluates)
    with pytest.raises(DesyncError, match=rf"sample \d+ of {name} differs between rank 1 and rank 0") as told:
        together(Own(), Own(1), evaluates=evaluates)
    assert "give every rank the whole dataset" in told.value.hint


@pytest.mark.parametrize("order", [[0.5, 1.5], [True, False], [[0, 1]], "random", 3, lambda total: [0], ["0"]])
def test_an_order_that_is_none_is_refused_by_name(order: Any) -> None:
    with pytest.raises(JobError, match="order="):
        fed(Counted(), order=order)


def test_an_order_may_be_of_any_whole_numbers_and_of_another_length_in_each_epoch() -> None:
    def order(total: int, epoch: int, seed: int) -> Any:
        return [torch.arange(4), range(20), np.arange(9, dtype=np.uint8)][epoch % 3]

    found = fed(Counted(), order=order, epochs=3)
    read = [[i for place in sorted(found) if place[0] == epoch for i in found[place]] for epoch in range(3)]
    assert read == [list(range(4)), list(range(20)), list(range(9))]


def test_a_long_exception_of_the_data_is_one_screen_and_whole_in_the_log() -> None:
    class Long(Counted):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("\n".join(["wrong " * 200] * 10_000))

    with pytest.raises(DataError) as told:
        fed(Long())
    assert len(str(told.value)) < 5000 and "9,992 more lines" in str(told.value)
    assert len(told.value.__notes__[0]) > 1_000_000


def test_batches_of_tensors_are_the_default() -> None:
    found = fed(Counted(), collate=None, epochs=1)
    assert torch.equal(found[0, 3, 0], default_collate([int(i) for i in found[0, 3, 0]]))


class Varied(Counted):
    """A dataset of a worker of a server, beside the one of the server."""

    def __init__(self, kind: str = "", *, length: int = SAMPLES) -> None:
        self.kind, self.length = kind, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.kind == "own numbers":
            return index, os.urandom(8)
        if self.kind == "epoch" and self.epoch > 0:
            return index + 1
        return SAMPLES - 1 - index if self.kind == "order" else index

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def compared(server: Any, worker: Any, *, epochs: int = 2) -> None:
    """What a worker finds in each epoch, from what the server says of its own data."""
    cut = BatchPartition(global_batch_size=8, micro_batch_size=2, reads_samples=False)
    options: dict[str, Any] = {"collate": as_given, "order": None, "seed": 5}
    leased = RandomAccessLoader(data=worker, sample_seeds="auto", global_batch_size=8, drop_last=False, **options)
    with closing(make_loader(data=server, partition=cut, cursor=Cursor(), **options)) as feed:
        for given in feed:
            if (epoch := given.batch.next_cursor.epoch) == epochs:
                return
            assert given.summary is not None and {0, SAMPLES // 2} <= set(given.summary.samples)
            leased.compare_data(epoch, given.summary, rank=2)


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (Varied("order"), r"sample 0 or .* of train_data differs between rank 2 and rank 0"),
        (Varied("epoch"), "of train_data differs between rank 2"),
        (Varied(length=SAMPLES + 8), "28 samples on rank 2 and 20 on rank 0"),
        (Varied(length=8), "8 samples on rank 2 and 20 on rank 0"),
    ],
    ids=["order", "epoch", "longer", "shorter"],
)
def test_a_worker_of_a_server_with_other_data_is_refused_by_name(worker: Any, said: str) -> None:
    with pytest.raises(DesyncError, match=said):
        compared(Varied(), worker)


def test_a_worker_of_a_server_with_the_same_data_or_numbers_of_its_own_goes_on() -> None:
    compared(Varied(), Varied())
    compared(Varied("own numbers"), Varied("own numbers"))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Plain:
    def __init__(self, value: Any) -> None:
        self.value, self.own = value, self


def dense(number: int) -> torch.Tensor:
    return torch.tensor([[0.0, number], [1.0, 0.0]])


CONTENTS: dict[str, Callable[[int], Any]] = {
    "object": lambda number: Plain([number]),
    "slots": lambda number: Slotted({"a": number}),
    "object array": lambda number: np.array([str(number), None], dtype=object),
    "coo": lambda number: dense(number).to_sparse_coo(),
    "csr": lambda number: dense(number).to_sparse_csr(),
    "nested": lambda number: torch.nested.nested_tensor([torch.ones(2), torch.full((3,), float(number))]),
    "quantized": lambda number: torch.quantize_per_tensor(dense(number), 0.5, 0, torch.qint8),
    "conjugate": lambda number: torch.tensor([number + 1j]).conj(),
    "set": lambda number: {f"{number}", "b", "c"},
    "tuple": lambda number: (number, [b"x"]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(CONTENTS))
def test_a_checksum_is_of_the_content(name: str) -> None:
    """Never of an address: ranks, and a run and its resume, have other objects."""
    one, same, other = (checksum(CONTENTS[name](number), 0) for number in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("as_loader", [False, True])
def test_a_function_that_gives_data_is_called_once(as_loader: bool) -> None:
    calls = []

    def make() -> Any:
        calls.append(1)
        return DataLoader(Counted()) if as_loader else Counted()

    job = Job(
        model=lambda: torch.nn.Linear(1, 1),
        train_data=make,
        eval_data=make,
        optimizer=torch.optim.SGD,
        global_batch_size=2,
    )
    data = JobData(job, Settings())
    for _ in range(3):
        assert data.train.data is data.split(make, name="eval_data").data
    assert len(calls) == 1


def test_a_function_that_gives_a_generator_is_called_for_each_reading() -> None:
    job = Job(
        model=lambda: torch.nn.Linear(1, 1),
        train_data=lambda: iter(range(3)),
        optimizer=torch.optim.SGD,
        global_batch_size=2,
    )
    source = JobData(job, Settings()).train
    assert list(source.data) == list(source.data) == [0, 1, 2]


@pytest.mark.parametrize(
    ("samples", "position", "said"),
    [
        (400, 352, None),
        (300, 352, "had 400 samples and has 300 (--allow data): this epoch was at sample 352, and ends there; "),
        (
            500,
            352,
            "had 400 samples and has 500 (--allow data): this epoch was at sample 352; counted in epochs of 500",
        ),
    ],
)
def test_another_length_that_is_allowed_is_told(samples: int, position: int, said: str | None) -> None:
    lines = list(
        data_length_notes(400, samples, cursor=Cursor(position=position, samples=position, step=22), total_steps=38)
    )
    assert len(lines) == (said is not None) and all(str(said) in line for line in lines)
