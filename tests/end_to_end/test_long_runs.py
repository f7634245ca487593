"""Long runs, for `make soak`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB, Shop

WATCH = """
import os, json, resource
from pathlib import Path
def on_eval(run):
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return {"resident": float(resident), "handles": float(len(os.listdir("/proc/self/fd"))),
            "threads": float(len(os.listdir("/proc/self/task")))}
"""


@pytest.mark.soak
@pytest.mark.parametrize("workers", ["0", "2"])
def test_twenty_thousand_steps_leak_nothing(shop: Shop, workers: str) -> None:
    shop.write("job.py", WATCH + SMALL_JOB.replace("max_grad_norm=1.0,", "max_grad_norm=1.0, on_eval=on_eval,"))
    ended = shop.train(
        "run",
        "--eval.every",
        "1000",
        "--checkpoint.every",
        "1000",
        "--log.every",
        "1000",
        "--train.on_nonfinite",
        "skip",
        "--data.workers",
        workers,
        ranks=2,
        steps=20_000,
        timeout=1500,
    )
    assert ended.code == 0, ended.text[-2000:]
    rows = [json.loads(line) for line in (shop.path / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [row for row in rows if "eval/resident" in row]
    assert seen[-1]["eval/resident"] <= seen[1]["eval/resident"] * 1.02 + 2048
    assert seen[-1]["eval/handles"] == seen[1]["eval/handles"]
    assert seen[-1]["eval/threads"] == seen[1]["eval/threads"]
    steps = [row["time/step"] for row in rows if "time/step" in row]
    print(
        f"resident {seen[1]['eval/resident']:.0f} -> {seen[-1]['eval/resident']:.0f} KiB; step {steps[1]:.5f} -> {steps[-1]:.5f} s"
    )
    assert steps[-1] <= steps[1] * 1.3


@pytest.mark.soak
@pytest.mark.parametrize("example", ["text", "digits"])
def test_exact_mode_gives_one_digest_on_real_data(shop: Shop, example: str) -> None:
    shop.run("new", example)
    name = {"text": "text.py", "digits": "digits_cnn.py"}[example]
    words = ["--train.exact", "--train.micro_batch_size", "6", "--train.steps", "200", "--eval.every", "1000",
             "--watch.to", "jsonl", "--job.dropout", "0.1"]  # fmt: skip
    words += ["--job.width", "48", "--job.depth", "2"] if example == "text" else []
    digests = set()
    for ranks in (1, 2, 3, 4, 5, 8):
        ended = shop.run("train", name, "--ranks", str(ranks), "--run-dir", f"on{ranks}", *words, timeout=900)
        assert ended.code == 0, ended.text[-2000:]
        digests.add(shop.digest(f"on{ranks}"))
    for attempt, (ranks, step) in enumerate(((2, 31), (5, 77), (1, 90), (3, 140), (8, 177)), 1):
        fault = f"kill rank={ranks - 1} step={step} attempt={attempt}"
        more = ["--checkpoint.every", "9", "--survive.restarts", "0", "--faults", fault]
        assert shop.run("train", name, "--ranks", str(ranks), "--run-dir", "cut", *words, *more, timeout=900).code == 1
    assert shop.run("train", name, "--ranks", "4", "--run-dir", "cut", *words, timeout=900).code == 0
    digests.add(shop.digest("cut"))
    assert len(digests) == 1, digests
    print(example, digests, os.cpu_count())


@pytest.mark.soak
def test_the_examples_reach_their_goals(shop: Shop) -> None:
    """digits: 97 % of the held-out digits. text, as `make demo` trains it: fewer bits per byte than a byte trigram."""
    for example, name, words in (("digits", "digits_cnn.py", ()), ("text", "text.py", ("--job.steps", "500"))):
        shop.run("new", example)
        ended = shop.run("train", name, "--ranks", "2", "--run-dir", example, *words, timeout=600)
        assert ended.code == 0, ended.text[-2000:]
    found = {name: shop.run("evaluate", name, "--json").json()["metrics"] for name in ("digits", "text")}
    script = Path(__file__).parents[2] / "benchmarks" / "trigram.py"
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    trigram = float(re.findall(r"\d+\.\d+", said)[-1])
    print(f"digits {found['digits']['accuracy']:.4f}; text {found['text']['bits_per_byte']:.4f} beside {trigram:.4f}")
    assert found["digits"]["accuracy"] >= 0.97
    assert found["text"]["bits_per_byte"] < trigram
