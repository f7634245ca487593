"""The programs by hand that start their own ranks: each ends well as it stands, and in an error with a planted mistake."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import Shop

BY_HAND = Path(__file__).resolve().parents[2] / "examples" / "by_hand"
PROGRAMS = ["naive", "fsdp", "pipeline", "tensor", "send"]
# program, what is wrong, the line as it stands, the line with the mistake, a row of the table that must show it
PLANTED = [
    ("naive", "a gradient is doubled on its way over the cut", "received.grad.to(", "2 * received.grad.to(", "weights"),
    ("fsdp", "gradients are not summed", "dist.reduce_scatter(mine, list(whole.chunk(dist.get_world_size())))",
     "mine.copy_(whole.chunk(dist.get_world_size())[dist.get_rank()])", "weights"),
    ("fsdp", "the mean of means", "/ (GLOBAL_BATCH * WIDTH)  # a sum", "/ x.numel()  # a sum", "weights"),
    ("tensor", "no all-reduce forward", "dist.all_reduce(total)\n        SENT[\"forward\"]", "SENT[\"forward\"]", "losses"),
    ("tensor", "no all-reduce backward", "dist.all_reduce(total)\n        SENT[\"backward\"]", "SENT[\"backward\"]",
     "weights 1"),
    ("tensor", "the bias once a rank", "linear(hidden, self.down_weight)", "linear(hidden, self.down_weight, self.down_bias)",
     "losses"),
    ("pipeline", "the gradient of another tensor", "self.send(inputs.grad,", "self.send(inputs.detach(),", "1F1B weights"),
    ("pipeline", "one backward too late", "min(stages - stage - 1, micro)", "min(stages - stage, micro)", "1F1B live"),
    ("send", "another reduction", "dist.all_reduce(mine)", "dist.all_reduce(mine, dist.ReduceOp.MAX)", "all_reduce"),
    ("send", "parts in another order", "list(mine.chunk(ranks)) if", "list(mine.chunk(ranks))[::-1] if", "scatter"),
]  # fmt: skip


def run(program: Path, shop: Shop) -> "subprocess.CompletedProcess[str]":
    """Run a program as its page says, in a folder of its own."""
    environ = {name: value for name, value in shop.environ().items() if name != "GLOO_SOCKET_IFNAME"}
    return subprocess.run(
        [sys.executable, str(program)],
        cwd=shop.path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def plant(shop: Shop, name: str, right: str, wrong: str) -> Path:
    """Return a copy of a program, with its harness, in which one text stands for another."""
    text = (BY_HAND / f"{name}.py").read_text()
    assert text.count(right) >= 1, f"{name}.py no longer says {right!r}: plant the mistake elsewhere"
    shutil.copy(BY_HAND / "harness.py", shop.path)
    (shop.path / f"{name}.py").write_text(text.replace(right, wrong))
    return shop.path / f"{name}.py"


def columns(text: str) -> dict[str, tuple[float, float]]:
    """Return the difference and what is allowed, by row of the table that `compare` prints."""
    table = text.partition("one process     by hand")[2].splitlines()[1:-1]
    return {line[:18].strip(): (float(line.split()[-2]), float(line.split()[-1])) for line in table}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_one_process(shop: Shop, name: str) -> None:
    done = run(BY_HAND / f"{name}.py", shop)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr == "", done.stderr[-2000:]
    assert done.stdout.endswith("equal up to rounding\n")
    table = columns(done.stdout)
    assert len(table) >= 2 and all(difference <= allowed for difference, allowed in table.values()), table


@pytest.mark.parametrize(
    ("name", "right", "wrong", "row"),
    [(name, right, wrong, row) for name, _, right, wrong, row in PLANTED],
    ids=[f"{name} {what}" for name, what, *_ in PLANTED],
)
def test_a_planted_mistake_is_an_error(shop: Shop, name: str, right: str, wrong: str, row: str) -> None:
    done = run(plant(shop, name, right, wrong), shop)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.endswith("DIFFERENT\n"), done.stdout[-2000:] + done.stderr[-2000:]
    difference, allowed = columns(done.stdout)[row]
    assert difference > 10 * allowed, f"{row}: {difference} is hardly more than {allowed}"


@pytest.mark.parametrize("mistake", ["stays away", "raises"])
def test_a_rank_that_fails_ends_the_others(shop: Shop, mistake: str) -> None:
    """A hang is an error after the timeout, an exception at once; no process is left behind."""
    text = "if rank != 1:\n        dist.all_reduce(mine)"
    if mistake == "raises":
        text = "if rank == 1:\n        raise ValueError('planted')\n    dist.all_reduce(mine)"
    program = plant(shop, "send", "dist.all_reduce(mine)", text)
    if mistake == "stays away":
        harness = shop.path / "harness.py"
        harness.write_text(harness.read_text().replace("TIMEOUT = 60", "TIMEOUT = 3"))
    start = time.monotonic()
    done = run(program, shop)
    took = time.monotonic() - start
    assert done.returncode == 1 and took < 55, done.stderr[-2000:]
    if mistake == "raises":
        assert "rank 1: planted" in done.stderr, done.stderr[-2000:]
    else:  # the first rank whose time is over closes its connections, which may end another rank a moment before
        assert took > 3 and ("Timed out" in done.stderr or "closed by peer" in done.stderr), done.stderr[-2000:]
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if str(program) in (one.info["cmdline"] or [])]
    assert not left


def test_the_programs_import_torch_alone() -> None:
    """A newcomer reads and runs them with PyTorch and the files of this folder."""
    for name in [*PROGRAMS, "harness"]:
        assert "paceline" not in (BY_HAND / f"{name}.py").read_text()
