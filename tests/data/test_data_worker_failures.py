"""A data worker that cannot start, cannot send or dies ends the run with its reason, and no rank waits for it."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from paceline.data.loader import make_loader, read_eval_microbatches
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.data.workers import start_workers
from paceline.errors import DataError
from paceline.launch.failures import oom_detection
from tests.conftest import Shop

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
LIMIT_SECONDS = 30.0


class NotAgain:
    """Can be pickled, and not be made again."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> Any:
    raise TypeError("missing 1 required argument")


def function() -> Any:
    return lambda: 0


def few_files() -> Any:
    free = os.open(os.devnull, os.O_RDONLY)  # the lowest number, which is what the limit is about
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
    return torch.ones(2)


def killed() -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class Odd(Dataset[Any]):
    """Of 16 samples the one in the middle is made by this function in a data worker."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.make() if index == 8 and get_worker_info() is not None else torch.tensor([float(index)])


class Streamed(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.data = Odd(make)

    def __iter__(self) -> Iterator[Any]:
        return (self.data.make() if index == 8 else self.data[index] for index in range(16))


def listed(rows: list[Any]) -> list[Any]:
    return rows


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A wait is a failure, and leaves no data worker."""

    def over(*_: Any) -> None:
        raise TimeoutError(f"still waiting after {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert not active_children()


def train(data: Any, *, workers: int) -> None:
    cut = BatchPartition(global_batch_size=4, micro_batch_size=4, replicas=1)
    feed = make_loader(
        data=data, collate=None if isinstance(data, DataLoader) else listed, order=None, seed=1, partition=cut,
        cursor=Cursor(), workers=workers,
    )  # fmt: skip
    with closing(feed):
        for _ in zip(feed, range(4), strict=False):
            pass


def evaluate(data: Any, *, workers: int) -> None:
    collate = None if isinstance(data, DataLoader) else listed
    list(
        read_eval_microbatches(data=data, collate=collate, batch_size=4, replica=0, replicas=1, seed=1, workers=workers)
    )


@pytest.mark.parametrize("use", [train, evaluate])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (function, "sending samples from a data worker to its rank failed.*<lambda>"),
        (NotAgain, "unpickle the samples that a data worker sent: TypeError: missing 1 required argument"),
        (few_files, r"Too many open files|too many files were open"),
        (killed, r"a data worker died|is killed by signal"),
    ],
)
def test_what_a_data_worker_cannot_send_ends_the_run(use: Any, own: bool, make: Any, said: str) -> None:
    data: Any = Odd(make)
    with pytest.raises((DataError, RuntimeError), match=said) as caught:
        if own:
            use(DataLoader(data, batch_size=4, num_workers=2, collate_fn=listed), workers=0)
        else:
            use(data, workers=2)
    assert isinstance(caught.value, DataError) or make is killed, "torch says it at once, wherever the rank is"


@pytest.mark.parametrize("use", [train, evaluate])
@pytest.mark.parametrize("make", [function, NotAgain, killed])
def test_what_a_data_worker_cannot_send_of_a_stream_ends_the_run(use: Any, make: Any) -> None:
    with pytest.raises((DataError, RuntimeError), match=r"lambda|can't unpickle|died|is killed by signal"):
        use(Streamed(make), workers=2)


@pytest.mark.parametrize("use", [train, evaluate])
@pytest.mark.parametrize(("is_stream", "nth"), [(False, 1), (False, 2), (False, 3), (True, 1), (True, 2)])
def test_data_workers_that_cannot_start_end_the_run_and_leave_none(
    use: Any, is_stream: bool, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks, fork = 0, os.fork

    def few() -> int:
        nonlocal forks
        forks += 1
        if forks >= nth:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", few)
    data: Any = Streamed(torch.Tensor) if is_stream else Odd(torch.Tensor)
    with pytest.raises(
        DataError, match=r"data workers? cannot be started: .*Resource temporarily unavailable"
    ) as caught:
        use(data, workers=3)
    assert "ulimit -u" in caught.value.cause
    assert "--data.workers" in caught.value.hint


@pytest.mark.parametrize(
    ("number", "cause", "hint"),
    [
        (
            errno.ENOSPC,
            "/dev/shm was full, in which data workers create their locks: 1.0 MiB of 64.0 MiB",
            "--shm-size",
        ),
        (errno.ENOSPC, "/dev/shm was full", "mount -o remount,size="),
        (errno.EROFS, "/dev/shm can't be written", "mount -o remount,rw /dev/shm"),
        (errno.EAGAIN, "ulimit -u", "fewer than --data.workers 2"),
    ],
)
def test_what_stops_the_start_of_data_workers_is_named(
    number: int, cause: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom_detection, "_shared_memory_bytes", lambda: (1 << 20, 64 << 20))
    monkeypatch.setattr(os, "access", lambda *_: number != errno.EROFS)
    with pytest.raises(DataError, match="2 data workers cannot be started") as caught, start_workers(2):
        raise OSError(number, os.strerror(number))
    assert cause in caught.value.cause and hint in caught.value.hint


JOB = """
import torch, paceline as pl
from torch.utils.data import DataLoader, TensorDataset

rows = torch.arange(32.0).reshape(16, 2) / 32

def make_job():
    return pl.Job(model=lambda: torch.nn.Linear(2, 1), loss=lambda out, batch: out.square().mean(), forward=lambda model, batch: model(batch[0]),
        train_data=TensorDataset(rows), eval_data=DataLoader(TensorDataset(rows), num_workers=1),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01), global_batch_size=16)
"""


def test_a_long_path_of_the_temporary_folder_is_no_obstacle(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_FORKSERVER_COMMAND", raising=False)
    long = tmp_path / ("long-" + "x" * 100)
    long.mkdir()
    shop.write("job.py", JOB)
    words = ["train", "job.py", "--ranks", "2", "--data.workers", "1", "--train.steps", "2", "--run-dir"]
    ended = shop.run(*words, "long", environ={"TMPDIR": str(long)}, timeout=LIMIT_SECONDS)
    assert ended.code == 0, ended.text
    assert not list(long.glob("pymp-*")), "its sockets are elsewhere"


def test_sockets_are_where_temporary_files_are_unless_the_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path("/tmp") / f"s{os.getpid()}"
    places = {"x" * (74 - len(str(short))): True, "x" * (75 - len(str(short))): False}
    for name, is_used in places.items():
        place = short / name
        place.mkdir(parents=True)
        monkeypatch.setattr("tempfile.tempdir", str(place))
        words = [sys.executable, "-c", SOCKET]
        done = subprocess.run(words, env={**os.environ, "TMPDIR": str(place)}, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert (Path(done.stdout.strip()).parent == place) == is_used
    shutil.rmtree(short)


SOCKET = """
from paceline.launch.agent.socket_paths import short_temporary_folder
from multiprocessing.connection import Listener
print(short_temporary_folder())
Listener(family="AF_UNIX").close()
"""
