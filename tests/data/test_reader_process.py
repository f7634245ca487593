"""A process that forks data workers reads no user data, because handles may open at the first read."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.loader import make_loader, read_eval_microbatches
from paceline.data.order.cursor import Cursor
from paceline.data.reader_process import DataProcess, read_in_process
from paceline.data.source import Source
from paceline.data.types import BatchPartition
from paceline.errors import DataError
from tests.conftest import Shop

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Watched(Dataset[Any]):
    """Notes which process asks for its length, or reads."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def note(self, what: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def __len__(self) -> int:
        self.note("len")
        return 21

    def __getitem__(self, index: int) -> Any:
        self.note("get")
        return torch.tensor(float(index))

    def collate(self, rows: list[Any]) -> Any:
        self.note("collate")
        return torch.stack(rows)


class Streamed(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, data: Watched) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(21))


def readers(notes: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for line in notes.read_text().splitlines():
        what, pid = line.split()
        found.setdefault(what, set()).add(int(pid))
    return found


def read_all(data: Any, collate: Any, *, workers: int) -> None:
    """Two epochs of training, a microbatch out of turn, and an evaluation."""
    cut = BatchPartition(global_batch_size=6, micro_batch_size=3, replicas=2)
    agree = lambda mine: [mine, mine]  # noqa: E731
    feed = make_loader(
        data=data,
        collate=collate,
        order=None,
        seed=1,
        partition=cut,
        cursor=Cursor(),
        workers=workers,
        gather_json=agree,
    )
    with closing(feed):
        for given, _ in zip(feed, range(9), strict=False):
            spare = given.read_stand_in
        assert spare is None or len(spare()) == 3
    found = read_eval_microbatches(
        data=data, collate=collate, batch_size=4, replica=0, replicas=1, seed=1, workers=workers, gather_json=agree
    )
    assert sorted(v for micro in found for v in micro.data.tolist()) == list(range(21))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_process_that_forks_data_workers_reads_nothing(is_stream: bool, tmp_path: Path) -> None:
    watched = Watched(tmp_path / "notes")
    data = Streamed(watched) if is_stream else watched
    read_all(data, watched.collate, workers=2)
    found = readers(watched.notes)
    assert set(found) == {"get", "collate"} | (set() if is_stream else {"len"})
    assert all(os.getpid() not in pids for pids in found.values())


def test_without_data_workers_it_is_read_in_place(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "notes")
    read_all(watched, watched.collate, workers=0)
    assert readers(watched.notes) == {what: {os.getpid()} for what in ("len", "get", "collate")}


class Prepared(Dataset[Any]):
    """Usable only in a data worker, where `worker_init_fn` has opened it; `__len__` reads an index that it needs."""

    opened = False
    index: "list[int] | None" = None

    def __len__(self) -> int:
        self.index = list(range(21))
        return 21

    def __getitem__(self, index: int) -> Any:
        assert self.opened and self.index is not None
        return torch.tensor(self.index[index])


def prepare(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None and info.id == number
    info.dataset.opened = True  # type: ignore[attr-defined]


def test_who_reads_out_of_turn_is_a_data_worker() -> None:
    loader = DataLoader(Prepared(), batch_size=3, num_workers=2, worker_init_fn=prepare)
    read_all(loader, None, workers=0)


def test_an_error_comes_back_with_its_line_and_a_death_by_name() -> None:
    source = Source(data=[0], workers=1)
    assert read_in_process(source, lambda: (os.getpid(), torch.arange(3)))[0] != os.getpid()
    with pytest.raises(DataError, match="ValueError: not this one") as told:
        read_in_process(source, refuse)
    assert "test_reader_process" in told.value.where
    with pytest.raises(DataError, match="a data worker died: its exit code is 3"):
        read_in_process(source, lambda: os._exit(3))


def refuse() -> None:
    raise ValueError("not this one")


def test_a_data_process_keeps_its_object_and_leaves_the_generators_alone() -> None:
    class Count:
        def __init__(self) -> None:
            self.total = 0

        def add(self, number: int) -> int:
            self.total += number
            return self.total

    before = torch.get_rng_state(), random.getstate()
    process = DataProcess(Source(data=[0], workers=1), make=Count)
    assert [process.call("add", 2), process.call("add", number=3)] == [2, 5]
    process.close()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


LAZY_JOB = '''
import io, mmap, os, sqlite3, struct, zipfile
import numpy as np, torch
import paceline as pl

SAMPLES = 1000
HERE = os.path.dirname(os.path.abspath(__file__))

def path(name):
    return os.path.join(HERE, name)

def write_records():
    with open(path("records.bin"), "wb") as file:
        file.write(b"".join(struct.pack("16f", *[float(i)] * 16) for i in range(SAMPLES)))
    with zipfile.ZipFile(path("records.zip"), "w") as archive:
        for i in range(SAMPLES):
            archive.writestr(str(i), struct.pack("16f", *[float(i)] * 16))
    base = sqlite3.connect(path("records.db"))
    base.execute("create table records (id integer primary key, value real)")
    base.executemany("insert into records values (?, ?)", [(i, float(i)) for i in range(SAMPLES)])
    base.commit()
    base.close()

def note(what):
    with open(path(f"{what}.txt"), "a") as file:
        file.write(f"{os.getpid()}\\n")

class Lazy(torch.utils.data.Dataset):
    """Five resources, each opened at the first read, as it is advised everywhere."""

    opened = None

    def __len__(self):
        note("readers")
        return SAMPLES

    def open(self):
        self.opened = os.getpid()
        self.file = open(path("records.bin"), "rb", buffering=0)
        self.zip = zipfile.ZipFile(path("records.zip"))
        self.base = sqlite3.connect(path("records.db"), check_same_thread=False)
        self.map = mmap.mmap(os.open(path("records.bin"), os.O_RDONLY), 0, access=mmap.ACCESS_READ)
        self.generator = np.random.default_rng(os.getpid())

    def __getitem__(self, index):
        if self.opened is None:
            note("readers")
            self.open()
        self.file.seek(index * 64)
        os.sched_yield()
        drawn = self.generator.random()
        found = [
            struct.unpack("16f", self.file.read(64))[3],
            struct.unpack("16f", self.zip.read(str(index)))[3],
            self.base.execute("select value from records where id = ?", (index,)).fetchone()[0],
            (self.map.seek(index * 64), struct.unpack("16f", self.map.read(64))[3])[1],
            index if self.opened == os.getpid() else -1,
        ]
        return torch.tensor(found), torch.tensor(float(index))

def wrong(batch):
    return int((batch[0] != batch[1][:, None]).sum())

def loss(output, batch):
    with open(path("wrong.txt"), "a") as file:
        file.write(f"{wrong(batch)} {batch[0].numel()}\\n")
    note("ranks")
    return ((output[:, 0] - batch[1]) ** 2).sum() * 1e-6, len(batch[1])

def make_job() -> pl.Job:
    model = lambda: torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = Lazy()
    return pl.Job(
        model=lambda: model(), loss=loss, forward=lambda model, batch: model(batch[0]),
        train_data=data, eval_data=data, collate=torch.utils.data.default_collate,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-3), global_batch_size=50,
        metrics={"wrong": lambda output, batch: (float(wrong(batch)), len(batch[1]))},
    )
'''


def numbers(shop: Shop, name: str) -> list[list[int]]:
    file = shop.path / f"{name}.txt"
    found = [[int(word) for word in line.split()] for line in file.read_text().splitlines()]
    file.unlink()
    return found


def lazy_shop(shop: Shop) -> Shop:
    shop.write("job.py", LAZY_JOB)
    done = shop.call([shop.command()[0], "-c", "import job; job.write_records()"])
    assert done.code == 0, done.err
    return shop


def of(shop: Shop, *words: str) -> tuple[int, int]:
    """How many records were wrong, and how many there were; no process that trains has read anything."""
    done = shop.run(*words, timeout=600)
    assert done.code == 0, done.out + done.err
    ranks = {pid for (pid,) in numbers(shop, "ranks")}
    assert ranks and not ranks & {pid for (pid,) in numbers(shop, "readers")}, "a rank has read"
    rows = numbers(shop, "wrong")
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def test_a_run_with_stages_and_evaluation_reads_no_wrong_record(shop: Shop) -> None:
    wrong, total = of(
        lazy_shop(shop), "train", "job.py", "--layout", "pp", "--ranks", "2", "--data.workers", "2", "--run-dir", "run",
        "--train.steps", "4", "--eval.every", "2", "--eval.batch_size", "250",
    )  # fmt: skip
    assert wrong == 0 and total >= 5 * (200 + 2000)


@pytest.mark.soak
def test_100_000_records_of_five_resources_are_right(shop: Shop) -> None:
    lazy_shop(shop)
    found = []
    for workers in range(5):
        for ranks in (1, 3):
            words = [
                "train",
                "job.py",
                "--ranks",
                str(ranks),
                "--data.workers",
                str(workers),
                "--run-dir",
                f"{workers}-{ranks}",
            ]
            done = shop.run(*words, "--train.epochs", "1", "--eval.batch_size", "50", timeout=600)
            assert done.code == 0, done.err
            rows = numbers(shop, "wrong")
            found.append((workers, ranks, sum(row[0] for row in rows), sum(row[1] for row in rows)))
            print(f"{workers} workers, {ranks} ranks: {found[-1][2]} of {found[-1][3]} records are wrong")
    assert sum(row[2] for row in found) == 0 and sum(row[3] for row in found) >= 100_000


@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    [
        ("train", "--layout", "tp", "--ranks", "2"),
        ("train", "--layout", "fsdp", "--ranks", "2"),
        ("train", "--layout", "auto", "--ranks", "2"),
        ("verify", "--ranks", "2"),
        ("verify", "--layout", "pp", "--ranks", "2"),
    ],
)
def test_no_path_reads_in_a_rank(words: tuple[str, ...], shop: Shop) -> None:
    more = ["--run-dir", "run", "--train.steps", "3"] if words[0] == "train" else []
    verb, *rest = words
    wrong, total = of(lazy_shop(shop), verb, "job.py", *rest, "--data.workers", "2", *more)
    assert wrong == 0 and total > 0
