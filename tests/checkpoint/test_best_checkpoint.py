"""The best model, loaded in plain torch without Paceline, gives the metric that was reported."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SMALL_JOB, Shop

PLAIN = (
    "import sys; sys.modules['paceline'] = None\nimport torch, torch.nn as nn\n"
    "import torch.nn.functional as F\nfrom safetensors.torch import load_file\n"
    + SMALL_JOB[SMALL_JOB.index("class Net") : SMALL_JOB.index("def loss")]
    + """
generator = torch.Generator().manual_seed(1)
x = torch.randn(50, 6, generator=generator)[:23]
y = (torch.randint(0, 7, (50,), generator=generator) % 4)[:23]
model = Net(norm=True, dropout=0.3)
model.load_state_dict(load_file("best/model.safetensors"))
model.eval()
with torch.no_grad():
    print((model(x).argmax(-1) == y).sum().item() / 23)
"""
)


@pytest.mark.parametrize("average", [False, True])
def test_the_best_model_gives_its_metric_in_plain_torch(shop: Shop, average: bool) -> None:
    extra = 'best="accuracy:min", ema=0.8,' if average else 'best="accuracy:max",'
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", f"        max_grad_norm=1.0, {extra}\n"))
    words = (
        "--job.norm",
        "true",
        "--job.dropout",
        "0.3",
        "--job.lr",
        "0.05",
        "--eval.every",
        "1",
        "--checkpoint.keep",
        "1",
    )
    assert shop.train("run", *words, steps=14).code == 0
    rows = [json.loads(line) for line in (shop.path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    best = int((shop.path / "run" / "checkpoints" / "best").read_text().split()[0].removeprefix("step-"))
    wanted = min(measured.values()) if average else max(measured.values())
    assert best == min(step for step, value in measured.items() if value == wanted)
    assert best != max(measured), "the last is the best: this shows nothing"
    assert shop.run("ckpt", "consolidate", "run", "--best", "--to", "best").code == 0
    done = subprocess.run([sys.executable, "-c", PLAIN], cwd=shop.path, capture_output=True, text=True, check=False)
    assert float(done.stdout) == measured[best], done.stderr


LOSS = PLAIN.replace("best/model", "{folder}/model").replace(
    "print((model(x).argmax(-1) == y).sum().item() / 23)",
    "kept = y != 3; print(F.cross_entropy(model(x)[kept], y[kept]).item())",
)


@pytest.mark.soak
def test_what_is_consolidated_is_the_model_that_was_evaluated(shop: Shop) -> None:
    words = ("--job.norm", "true", "--job.dropout", "0.3", "--job.lr", "0.05")
    assert shop.train("plain", *words, steps=9).code == 0
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", "        max_grad_norm=1.0, ema=0.9,\n"))
    said = shop.train("run", *words, steps=9).text
    assert "ema: 0.9, evaluated and consolidated instead of the weights" in said
    assert " | averaged weights | 23 samples" in said
    for name, flags in {"newest": (), "average": ("--average",), "raw": ("--raw",)}.items():
        assert shop.run("ckpt", "consolidate", "run", "--to", name, *flags).code == 0
    folders = ("plain/consolidated", "run/consolidated", "newest", "average", "raw")
    plain, *averages, raw = (load_file(shop.path / folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(raw[name], plain[name]) for name in plain)
    assert all(torch.equal(found[name], averages[0][name]) for found in averages for name in plain)
    rows = [json.loads(line) for line in (shop.path / "run" / "metrics.jsonl").read_text().splitlines()]
    reported = [row["eval/loss"] for row in rows if "eval/loss" in row][-1]
    measured = [_plain_loss(shop, folder) for folder in ("run/consolidated", "raw")]
    assert abs(measured[0] - reported) < 1e-5
    assert abs(measured[1] - reported) > 1e-3, "the average is as good as the weights: this shows nothing"
    assert shop.digest("run") == shop.digest("plain"), "the digest is that of the weights in training"


@pytest.mark.soak
def test_another_metric_on_going_on_has_a_best_of_its_own(shop: Shop) -> None:
    option = '        max_grad_norm=1.0, best="{}",\n'
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", option.format("loss:min")))
    assert "is the best so far" in shop.train("run", "--eval.every", "2", steps=4).out
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", option.format("accuracy:max")))
    said = shop.train("run", "--eval.every", "2", steps=8).out
    assert "best: by accuracy:max from here on" in said, said
    assert "saved step-00000006 (best)" in said, said
    marked = int((shop.path / "run" / "checkpoints" / "best").read_text().split()[0].removeprefix("step-"))
    assert marked >= 6
    assert "best: by" not in shop.train("run", "--eval.every", "2", steps=9).out


def test_an_average_that_is_not_there_is_refused(shop: Shop) -> None:
    assert shop.train("run", steps=2).code == 0
    ended = shop.run("ckpt", "consolidate", "run", "--average", "--to", "average")
    assert ended.code == 2
    assert "contains no average" in ended.text
    assert not (shop.path / "average").exists()
    assert shop.run("ckpt", "consolidate", "run", "--average", "--raw", "--to", "both").code == 2


def _plain_loss(shop: Shop, folder: str) -> float:
    code = LOSS.replace("{folder}", folder)
    done = subprocess.run([sys.executable, "-c", code], cwd=shop.path, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return float(done.stdout)
