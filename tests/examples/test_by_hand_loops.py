"""The by-hand loops, in one process and in several, agree with each other and with Paceline tensor by tensor."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Shop

pytestmark = pytest.mark.one_worker  # what they share is made once

BY_HAND = Path(__file__).resolve().parents[2] / "examples" / "by_hand"
# Ten SGD steps in float32. Another order of a sum moves a gradient by units of 6e-8 of its size, a weight by 0.2 times
# that, times ten for the momentum, ten times. Measured: at most 1.1e-7.
APART = 2e-6
OURS = """
import sys; sys.path.insert(0, {folder!r})
import torch, paceline as pl
from single import GLOBAL_BATCH, MICRO_BATCH, STEPS, make_data, make_model, make_optimizer
import torch.nn.functional as F

def make_job():
    return pl.Job(
        model=make_model,
        loss=lambda o, b: (F.cross_entropy(o, b[1], reduction="sum", ignore_index=-1), (b[1] >= 0).sum()),
        train_data=torch.utils.data.TensorDataset(*make_data()), order="sequential",
        optimizer=lambda named: make_optimizer([p for _, p in named]),
        global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, settings={{"train.steps": STEPS}},
    )
"""
# Every loop on 1, 2, 4 and 8 ranks, forked from one process so that torch is imported once.
ALL = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch._dynamo, torch.distributed as dist
import single, ddp, accumulate
torch.set_num_threads(1)
for name, loop, ranks in [(n, m, r) for n, m in (("ddp", ddp), ("accumulate", accumulate)) for r in (1, 2, 4, 8)]:
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            store = f"file://{os.getcwd()}/{name}-{ranks}.meet"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
            model = loop.train(rank, ranks)
            torch.save(model.state_dict(), f"{name}-{ranks}-{rank}.pt")
            dist.barrier()
            os._exit(0)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
torch.save(single.train().state_dict(), "single.pt")
"""


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of every loop, every number of ranks and every rank."""
    folder = tmp_path_factory.mktemp("by_hand")
    environ = {**Shop.environ({"OMP_NUM_THREADS": "1"}), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", ALL, str(BY_HAND)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.0, atol=APART, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("loop", ["ddp", "accumulate"])
def test_the_loops_by_hand_agree_on_every_rank(by_hand: Path, loop: str) -> None:
    """Six microbatches a step: on four ranks 2, 2, 1 and 1; on eight ranks two have none."""
    import torch

    for ranks in (1, 2, 4, 8):
        for rank in range(ranks):
            assert_close(torch.load(by_hand / f"{loop}-{ranks}-{rank}.pt"), torch.load(by_hand / "single.pt"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_paceline_is_the_loop_by_hand(shop: Shop, by_hand: Path, ranks: int) -> None:
    import torch
    from safetensors.torch import load_file

    shop.write("job.py", OURS.format(folder=str(BY_HAND)))
    ended = shop.run("train", "job.py", "--ranks", str(ranks), "--run-dir", "run", "--train.threads", "1")
    assert ended.code == 0, ended.text
    ours = load_file(shop.path / "run" / "consolidated" / "model.safetensors")
    assert_close(ours, {name: torch.load(by_hand / "single.pt")[name] for name in ours})


@pytest.mark.parametrize("loop", ["ddp", "accumulate"])
def test_the_loops_run_as_their_first_line_says(shop: Shop, by_hand: Path, loop: str) -> None:
    import torch

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(BY_HAND / f"{loop}.py"), "--save", str(shop.path / "theirs.pt")]
    done = subprocess.run(command, env=shop.environ(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_close(torch.load(shop.path / "theirs.pt"), torch.load(by_hand / "single.pt"))
