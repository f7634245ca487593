"""The best model, loaded in plain torch without Paceline, gives the metric that was reported."""

import json
import subprocess
import sys

import pytest

from tests.conftest import SMALL_JOB, Shop

PLAIN = (
    "import sys; sys.modules['paceline'] = None\nimport torch, torch.nn as nn\nfrom safetensors.torch import load_file\n"
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
    best = int((shop.path / "run" / "checkpoints" / "best").read_text().strip().removeprefix("step-"))
    wanted = min(measured.values()) if average else max(measured.values())
    assert best == min(step for step, value in measured.items() if value == wanted)
    assert best != max(measured), "the last is the best: this shows nothing"
    assert shop.run("ckpt", "consolidate", "run", "--best", "--to", "best").code == 0
    done = subprocess.run([sys.executable, "-c", PLAIN], cwd=shop.path, capture_output=True, text=True, check=False)
    assert float(done.stdout) == measured[best], done.stderr
