"""What tests share: small jobs written to a folder, and the command run as a user runs it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from tests.longer import is_extra_seed, is_longer
from tests.quick import is_quick
from tests.scheduling import FileScheduling
from tests.warm.fixture import SharedMothers, cold, mother, warm

__all__ = ["cold", "mother", "warm"]

SMALL_JOB = """
import os, time
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

class Net(nn.Module):
    def __init__(self, norm, dropout):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.dropout(torch.tanh(self.norm(self.first(x)))))

def loss(output, batch):
    time.sleep(float(os.environ.get("PAUSE", 0)))
    kept = batch[-1] != 3
    return F.cross_entropy(output[kept], batch[-1][kept], reduction="sum"), kept.sum()

def make_job(samples: int = 50, batch: int = 12, norm: bool = False, dropout: float = 0.0, lr: float = 1e-2,
             two_terms: bool = False, fused: bool = False) -> pl.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(0, 7, (samples,), generator=generator) % 4

    def two(output, batch):
        kept = batch[-1] != 3
        token = F.cross_entropy(output[kept], batch[-1][kept], reduction="sum"), kept.sum()
        return {"token": token, "size": (output.square().sum() * 0.01, len(output))}

    def counts(batch):
        return {"token": (batch[-1] != 3).sum(), "size": len(batch[-1])}

    def optimizer(named):
        decay = [p for n, p in named if p.dim() > 1]
        rest = [p for n, p in named if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, fused=fused or None)

    return pl.Job(
        model=lambda: Net(norm, dropout),
        loss=two if two_terms else loss,
        count=counts if two_terms else None,
        train_data=torch.utils.data.TensorDataset(x, y),
        eval_data=torch.utils.data.TensorDataset(x[:23], y[:23]),
        optimizer=optimizer,
        lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.9),
        global_batch_size=batch,
        max_grad_norm=1.0,
        metrics={"accuracy": lambda output, batch: ((output.argmax(-1) == batch[-1]).sum(), len(batch[-1]))},
    )
"""


def no_process(*words: object, **options: object) -> None:
    """Stands in for `subprocess.Popen` where nothing may be started."""
    raise AssertionError(f"a process was started: {words}")


@dataclass
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Shop:
    """A folder with a job in it, and the command."""

    path: Path
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def run(self, *words: str, timeout: float = 120, environ: dict[str, str] | None = None) -> Ended:
        """Run `paceline WORDS` here."""
        return self.call(self.command(*words), timeout=timeout, environ=environ)

    def call(self, command: list[str], *, timeout: float = 120, environ: dict[str, str] | None = None) -> Ended:
        """Run any command here."""
        done = subprocess.run(
            command,
            cwd=self.path,
            env=self.environ(environ),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def start(self, *words: str, environ: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start `paceline WORDS` here and don't wait; its steps pause, to leave the processors to the other tests."""
        process = subprocess.Popen(
            self.command(*words),
            cwd=self.path,
            env=self.environ({"PAUSE": "0.004", **(environ or {})}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """What a test that failed did not wait for is not left to take the time of the others."""
        for process in self.started:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=60)

    def train(self, run: str, *words: str, ranks: int = 2, steps: int = 12, timeout: float = 120) -> Ended:
        """Train the job into `run`."""
        return self.run(
            "train", "job.py", "--ranks", str(ranks), "--run-dir", run, "--train.steps", str(steps), *words,
            "--watch.to", "console,jsonl", timeout=timeout,
        )  # fmt: skip

    def digest(self, run: str) -> str:
        """The digest of a run's final weights."""
        return str(json.loads((self.path / run / "weights.json").read_text())["digest"])

    def write(self, name: str, text: str) -> Path:
        """Write a file here."""
        path = self.path / name
        path.write_text(text)
        return path

    @staticmethod
    def command(*words: str) -> list[str]:
        return [sys.executable, "-W", "ignore", "-m", "paceline", *words]

    @staticmethod
    def environ(extra: dict[str, str] | None = None) -> dict[str, str]:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "SLURM_", "PMI", "TORCHELASTIC"))
        }
        fixed = {"NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": "", "PACELINE_VERBOSE": "1"}
        fixed["PYTHONUNBUFFERED"] = (
            ""  # unbuffered, one print() is several writes, and those of two ranks mix in one pipe
        )
        return {**inherited, **fixed, **(extra or {})}


settings.register_profile("no clock", deadline=None)  # a busy machine is no fault
settings.load_profile("no clock")


def pytest_configure(config: pytest.Config) -> None:
    """Several workers start their commands from the same processes that wait."""
    config.pluginmanager.register(SharedMothers())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import what `-m quick` leaves out: that takes longer than the quick tests."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "quick" or not is_test:
        return None
    return True if not is_quick(str(collection_path.relative_to(Path(__file__).parent))) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is longer than it is worth every time waits for `make soak`."""
    for item in items:
        name, drawn = item.nodeid.removeprefix("tests/"), getattr(item, "callspec", None)
        if is_longer(name) or (drawn is not None and is_extra_seed(name, drawn.params.get("seed"))):
            item.add_marker(pytest.mark.soak)
        if is_quick(name) and not any(item.get_closest_marker(mark) for mark in ("soak", "clock", "gpu")):
            item.add_marker(pytest.mark.quick)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file that is marked `one_worker` together."""
    return FileScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(scope="session", autouse=True)
def heard_signals() -> None:
    """A shell's `&` and `nohup` have their signals ignored, which commands would inherit, and obey."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is remembered of a machine and of runs is none of the user's, nor of an earlier run of the tests."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Workers share the cores, and threads of torch that wait for each other would take all of them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Run a test with one thread of torch, however many the tests before it left."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    """A fresh folder with the small job."""
    shop = Shop(tmp_path)
    shop.write("job.py", SMALL_JOB)
    yield shop
    shop.end()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A process that a test left behind is a failure; left alone it may also hold this one for ever."""
    yield
    told = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one of those: it has ended, only nobody has asked
            told.append(f"{process.pid} {' '.join(process.cmdline())}")
            process.kill()
    assert not told, "left behind by a test"
