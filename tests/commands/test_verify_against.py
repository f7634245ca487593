"""`verify --against`: a layout against another layout or a recording, without any process that has the whole model."""

import json

import pytest

from tests.conftest import Shop

CHAIN = """
import os, torch, torch.nn.functional as F, paceline as pl

def make_job(scale: float = 0.0, fails: bool = False):
    assert not fails
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    factor = 1 + scale * int(os.environ.get("RANK", "0"))
    block = lambda: torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    return pl.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), *(block() for _ in range(4)), torch.nn.Linear(16, 2)),
        loss=lambda output, batch: (factor * F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        train_data=torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        global_batch_size=12,
    )
"""


def test_layouts_against_each_other_and_against_a_recorded_run(shop: Shop) -> None:
    shop.write("chain.py", CHAIN)
    words = ("verify", "chain.py", "--ranks", "2", "--steps", "2", "--json")
    done = shop.run(*words, "--layout", "pp=2", "--against", "fsdp", "--run-dir", "runs/staged")
    answer = done.json()
    assert done.code == 0 and answer["verdict"] in ("bitwise", "rounding"), done.text
    assert answer["rungs"][0]["compared"] == {"gradients": 2 * 12, "weights": 3 * 12}
    assert answer["reference"] == "fsdp on 2 ranks" and answer["lines"][-1].startswith(
        "pp=2 on 2 ranks is the same training as fsdp on 2 ranks: "
    )
    assert json.loads((shop.path / "runs/staged/answer-verify.json").read_text())["verdict"] == answer["verdict"]
    recorded = shop.run(*words, "--layout", "tp", "--against", "runs/staged")
    assert recorded.code == 0 and recorded.json()["reference"] == "the recording runs/staged", recorded.text
    itself = shop.run(*words, "--layout", "tp", "--against", "runs/staged", "--run-dir", "runs/staged")
    assert itself.code == 2 and "it would be overwritten" in itself.out + itself.err, itself.text
    failed = shop.run(*words, "--layout", "tp", "--against", "fsdp", "--run-dir", "runs/staged", "--job.fails", "true")
    assert failed.code == 1, failed.text
    other = shop.run(*words, "--layout", "ddp", "--against", "runs/staged", "--job.scale", "0.01")
    first = other.json()["first_difference"]
    assert other.code == 4 and first["step"] == 1 and "gradients differ" in first["cause"], other.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--layout", "ddp", "--against", "ddp"), "names the layout itself"),
        (("--against", "ddp"), "--against needs --layout"),
        (("--layout", "auto", "--against", "ddp"), "--against needs --layout"),
        (("--layout", "ddp", "--against", "dpp"), "dpp"),
        (("--layout", "ddp", "--against", "empty"), "empty has no recording"),
        (("--layout", "ddp", "--against", "fsdp", "--compress", "bf16"), "layouts of synchronous training"),
        (("--update", "pipedream", "--layout", "pp", "--against", "fsdp"), "layouts of synchronous training"),
        (("--layout", "ddp", "--against", "pp=3"), "pp=3 needs 3 ranks"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_start(shop: Shop, words: tuple[str, ...], said: str) -> None:
    (shop.path / "empty").mkdir()
    done = shop.run("verify", "job.py", "--ranks", "2", *words)
    assert done.code == 2 and said in done.err, done.text
    assert not (shop.path / "runs").exists()
