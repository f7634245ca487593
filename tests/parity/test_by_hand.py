"""The by-hand loops, one process and several, agree with each other and with Paceline."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Shop

BY_HAND = Path(__file__).resolve().parents[2] / "examples" / "by_hand"
OURS = """
import sys; sys.path.insert(0, {folder!r})
import torch, paceline as pl
from single import GLOBAL_BATCH, MICRO_BATCH, STEPS, make_data, make_model
import torch.nn.functional as F

def make_job():
    return pl.Job(
        model=make_model,
        loss=lambda o, b: (F.cross_entropy(o, b[1], reduction="sum", ignore_index=-1), (b[1] >= 0).sum()),
        train_data=torch.utils.data.TensorDataset(*make_data()), order="sequential",
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, settings={{"train.steps": STEPS}},
    )
"""


def number(command: list[str], shop: Shop) -> float:
    done = subprocess.run(
        command, cwd=BY_HAND, env=shop.environ(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout.split()[-1])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_paceline_is_the_loop_by_hand(shop: Shop, ranks: int) -> None:
    alone = number([sys.executable, "single.py"], shop)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    assert number([*torchrun, "ddp.py"], shop) == pytest.approx(alone, rel=1e-6)
    shop.write("job.py", OURS.format(folder=str(BY_HAND)))
    ended = shop.run("train", "job.py", "--ranks", str(ranks), "--run-dir", "run", "--train.threads", "1")
    assert ended.code == 0, ended.text
    from safetensors.numpy import load_file

    weights = load_file(shop.path / "run" / "consolidated" / "model.safetensors")
    assert sum(v.astype(float).sum() for v in weights.values()) == pytest.approx(alone, rel=1e-6)
