"""What a user reads: where a run failed, how to resume, how long things took."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import SMALL_JOB, Shop

WORDS = ("--watch.to", "console,jsonl")
RANK = "import os, time\nRANK = int(os.environ.get('RANK', 0)); STEP = [0]\n"


def dying(at: int) -> str:
    """Rank 1 raises in the forward of this step."""
    return RANK + SMALL_JOB.replace(
        "    def forward(self, x):\n",
        "    def forward(self, x):\n        STEP[0] += 1\n"
        f"        if RANK == 1 and STEP[0] == {at}: raise IndexError('row 4 is odd')\n",
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def joined(shop: Shop, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline"]
    return subprocess.run(
        [*command, *words], cwd=shop.path, env=shop.environ(), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("step", [1, 4])
def test_an_exception_is_said_to_be_in_its_step(shop: Shop, step: int) -> None:
    shop.write("job.py", dying(step))
    ended = shop.train("run")
    assert ended.err.startswith(f"FAILED at step {step}. First error: rank 1, {shop.path}/job.py:"), ended.err
    assert "at step" not in ended.err.partition("\n")[2]


def test_what_fails_before_the_first_step_names_none(shop: Shop) -> None:
    shop.write("job.py", RANK + SMALL_JOB.replace("super().__init__()", "super().__init__()\n        {}['width']"))
    assert shop.train("run").err.startswith("FAILED. First error: rank ")


def test_a_failure_in_an_evaluation_is_in_the_step_before_it(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", "        on_eval=lambda run: 1 / 0,\n"))
    assert shop.train("run", "--eval.every", "4").err.startswith("FAILED at step 4. ")


def test_under_torchrun_the_step_and_the_line_that_goes_on_are_said_too(shop: Shop) -> None:
    shop.write("job.py", dying(4))
    ended = joined(
        shop, "train", "job.py", "--run-dir", "run", "--train.steps", "12", "--checkpoint.every", "2", *WORDS
    )
    assert ended.returncode == 1 and "paceline/" not in ended.stderr.partition("FAILED")[0]
    assert re.search(r"^FAILED at step 4\. rank 1, .*job\.py:\d+, IndexError: row 4 is odd$", ended.stderr, re.M)
    assert re.search(
        r"^rank 0 stopped at step 4 because rank 1 failed at step 4: IndexError: row 4 is odd", ended.stderr, re.M
    ), ended.stderr
    again = (
        "torchrun --standalone --nproc-per-node 2 -m paceline train job.py --run-dir run --train.steps 12 "
        "--checkpoint.every 2"
    )
    assert ended.stderr.count(f"Resume: {again}") == 1
    assert "run: .\n" not in ended.stdout


def test_ranks_that_do_not_meet_say_so_in_our_words_and_keep_torchs(shop: Shop) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    words = ("train", "job.py", "--train.timeout_seconds", "2")
    ended = shop.run(*words, environ={**place, "MASTER_PORT": "9", "TMPDIR": str(shop.path)})
    assert ended.code == 3
    assert ended.err.startswith("rank 1: rank 1 of 2 could not join the other ranks"), ended.err
    assert "frame #" not in ended.err and len(ended.err.splitlines()) <= 5
    named = re.search(r"full text: (\S+)", ended.err)
    assert named is not None and "TCPStore" in Path(named[1]).read_text()


def test_the_time_of_a_step_is_the_steps_own(shop: Shop) -> None:
    slow = "        on_eval=lambda run: __import__('time').sleep(1.5),\n"
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", slow))
    ended = shop.train("run", "--log.every", "2", ranks=1)
    found = {row["step"]: row for row in rows(shop.path / "run") if "time/step" in row}
    after = found[12]  # the evaluation of step 10 lies between the lines of steps 10 and 12
    assert after["time/step"] < 0.5
    assert after["samples_per_second"] > 12 / 0.5
    assert after["time/step"] * after["time/evaluation"] == pytest.approx(1.5 / 2, rel=0.4)
    assert re.search(r"^eval 10 .* 23 samples, each once, in 1\.\d s$", ended.out, re.M), ended.out


def test_a_short_run_saves_and_evaluates_each_tenth_step_and_at_the_end(shop: Shop) -> None:
    ended = shop.train("run", ranks=1)
    assert "steps: 12, evaluate every 10 and at the end, save every 10 and at the end" in ended.out
    assert [row["step"] for row in rows(shop.path / "run") if "eval/loss" in row] == [10, 12]
    assert [int(number) for number in re.findall(r"^saved .*step-(\d+)", ended.out, re.M)] == [10, 12]
    assert "0.0 MiB" not in ended.out and "KiB in" in ended.out
    assert "in 1 microbatch of 12 (1 per replica)" in ended.out and "(1 replica" not in ended.out
    assert re.search(r"KiB", shop.run("ckpt", "ls", "run").out)


def test_an_evaluation_speaks_at_once_and_leaves_the_run_as_it_was(shop: Shop) -> None:
    uses = "        on_eval=lambda run: {'parameters': sum(1 for _ in run.model.parameters())},\n"
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", uses))
    trained = shop.train("run", ranks=1)
    assert trained.code == 0, trained.text
    names = ("task.json", "config.toml", "plan.json", "env.json")
    before = {name: (shop.path / "run" / name).read_text() for name in names}
    ended = shop.run("evaluate", "run", "--ranks", "2")
    assert ended.code == 0, ended.text
    assert ended.out.splitlines()[0] == "evaluating run on eval_data with 2 processes"
    assert "parameters 6.000000" in ended.out
    assert {name: (shop.path / "run" / name).read_text() for name in names} == before
    assert shop.run("evaluate", "run", "--json").json()["step"] == 12
    shop.run("report", "run")
    page = (shop.path / "run" / "report.html").read_text()
    assert "<dt>status</dt><dd>done</dd>" in page and "logged steps were done again" not in page
    assert "<dt>samples</dt><dd>–</dd>" not in page
    saved = sorted((shop.path / "run" / "checkpoints").glob("step-*"))
    flip_last_byte(saved[-1] / "model.safetensors")
    refused = f"refused run/checkpoints/{saved[-1].name}: "
    older = shop.run("evaluate", "run")
    assert older.code == 0 and f"step {int(saved[-2].name[5:])}" in older.out and refused in older.err, older.text
    exported = shop.run("ckpt", "consolidate", "run", "--to", "exported")
    assert exported.code == 0 and refused in exported.err, exported.text
    assert refused in shop.run("train", "job.py", "--resume", "run", "--run-dir", "branch", "--train.steps", "13").err


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.soak
def test_compare_says_defaults_ranks_and_attempts(shop: Shop) -> None:
    shop.train("a", ranks=1)
    shop.train(
        "b",
        "--survive.restarts",
        "0",
        "--faults",
        "kill rank=0 step=11",
        "--data.workers",
        "1",
        "--job.lr",
        "0.1",
        ranks=1,
    )
    shop.train("b", "--data.workers", "1", "--job.lr", "0.1", ranks=1)
    text = shop.run("compare", "a", "b").out
    said = {line.split("  ")[1].strip(): line for line in text.splitlines() if line.startswith("  ")}
    assert re.search(r"0 \(default\) +1$", said["data.workers"]), text
    assert re.search(r"the job's own +0\.1$", said["job.lr"]), text
    assert re.search(r"1 +1$", said["ranks"]) and re.search(r"1 +2$", said["attempts"]), text


def test_config_shows_what_the_job_sets_itself(shop: Shop) -> None:
    given = "        max_grad_norm=1.0, settings={'train.steps': batch * 2, 'log.every': 3},\n"
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", given))
    rows = shop.run("config", "job.py", "--job.batch", "8", "--log.every", "5", "--json").json()
    found = {row["name"]: (row["value"], row["origin"]) for row in rows}
    assert found["train.steps"] == (16, "job") and found["train.max_grad_norm"] == (1.0, "job")
    assert found["log.every"] == ("5", "command line") and found["seed"] == (0, "default")
    shop.write("job.py", "import nothing_of_this_name\n" + SMALL_JOB)
    ended = shop.run("config", "job.py")
    assert ended.code == 2 and "nothing_of_this_name" in ended.err and f"{shop.path}/job.py:1" in ended.err, ended.err


def test_verify_counts_steps_as_train_does_and_says_which_is_the_short_one(shop: Shop) -> None:
    ended = shop.run("verify", "job.py", "--ranks", "1", "--layout", "single")
    assert ended.code == 0, ended.text
    told = re.findall(r"^verify: fp32: (step .*)$", ended.out, re.M)
    assert told == [
        "step 1 (1 of the 3 that are compared)",
        "step 2 (2 of the 3 that are compared)",
        "step 5, the epoch's short last batch (3 of the 3 that are compared)",
    ], ended.out


@pytest.mark.parametrize("sampler", ["", pytest.param(", sampler=[3, 1, 4, 1]", marks=pytest.mark.soak)])
def test_verify_compares_the_evaluation_of_a_dataloader(shop: Shop, sampler: str) -> None:
    collate = "collate_fn=lambda rows: [2 * torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])]"
    loader = (
        f"torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:23], y[:23]), batch_size=5, {collate}{sampler})"
    )
    data = "torch.utils.data.TensorDataset(x[:23], y[:23]),\n        opt"
    assert data in SMALL_JOB
    shop.write("job.py", SMALL_JOB.replace(data, f"{loader},\n        opt"))
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 0, ended.text
    free = ended.json()["rungs"][-1]
    assert free["compared"].get("metrics", 0) == (0 if sampler else 2)
    assert ("not compared" in free["detail"]) == bool(sampler)


def test_the_examples_sample_is_text_to_read() -> None:
    import torch

    from paceline.examples.text import make_job

    job = make_job()
    assert job.on_eval is not None
    run = SimpleNamespace(generate=lambda prompt, **_: torch.tensor([[*b"a = 1\n\x00\x07\x1b[31m", 200, 255, 9]]))
    found = job.on_eval(run)
    assert found is not None and found["sample"] == "a = 1\n···[31m···"


@pytest.mark.soak
def test_the_answer_for_a_script_says_what_the_screen_says(shop: Shop) -> None:
    spoilt = "kept = batch[-1] != 3\n    if os.environ.get('SPOIL'): raise KeyError('no such column')"
    shop.write("job.py", SMALL_JOB.replace("kept = batch[-1] != 3", spoilt, 1))
    words = ("train", "job.py", "--ranks", "2", "--run-dir", "run", "--eval.every", "2", "--json", "--train.steps")
    done = shop.run(*words, "4").json()
    measured = rows(shop.path / "run")
    assert done["exit_code"] == 0 and done["step"] == 4 and done["digest"] == shop.digest("run")
    assert done["evaluation"]["step"] == 4
    assert done["evaluation"]["metrics"]["loss"] == [row["eval/loss"] for row in measured if "eval/loss" in row][-1]

    ended = shop.run(*words, "6", environ={"SPOIL": "1"})
    failed = ended.json()
    assert ended.code == failed["exit_code"] == 1
    assert (failed["error"], failed["what"], failed["step"]) == ("KeyError", "'no such column'", 5)
    assert re.search(r"job\.py:\d+$", failed["where"]) and failed["rank"] in (0, 1)
    assert "no such column" in (shop.path / failed["log"]).read_text()
    assert failed["go_on"].startswith("paceline train job.py --run-dir run --ranks 2")
    assert "digest" not in failed and "evaluation" not in failed

    refused = shop.run(*words, "6", "--job.batch", "6").json()
    assert (refused["exit_code"], refused["error"], refused["go_on"]) == (2, "ResumeError", "")
    assert "global_batch_size" in refused["what"] and refused["hint"].startswith("--allow")
    for verb in (("verify", "job.py", "--ranks", "2"), ("evaluate", "run")):
        ended = shop.run(*verb, "--json", environ={"SPOIL": "1"})
        assert (ended.code, ended.json()["error"], ended.json()["go_on"]) == (1, "KeyError", ""), verb


def test_verify_of_a_job_without_a_finite_gradient_has_no_verdict(shop: Shop) -> None:
    shop.write(
        "job.py",
        SMALL_JOB.replace(
            "def loss(output, batch):", "def loss(output, batch):\n    output = output * float('nan')", 1
        ),
    )
    ended = shop.run("verify", "job.py", "--ranks", "2", "--json")
    assert ended.code == 1 and json.loads(ended.out)["verdict"] == "undecided", ended.text


@pytest.mark.parametrize("layout", ["ddp", "pp"])
def test_a_metric_that_returns_a_mean_with_a_count_is_warned_about(shop: Shop, layout: str) -> None:
    mean = "metrics={'share': lambda output, batch: ((output.argmax(-1) == batch[-1]).float().mean(), len(output)),"
    assert "metrics={" in SMALL_JOB
    shop.write("job.py", SMALL_JOB.replace("metrics={", mean))
    ended = shop.train("run", "--eval.every", "2", "--layout", layout, steps=4)
    warning = "warning: the metric 'share' is not a sum over samples: it returns a mean with a count"
    assert ended.code == 0 and ended.text.count(warning) == 1, ended.text
    assert "'accuracy' is not a sum" not in ended.text


@pytest.mark.cold
def test_a_random_split_in_make_job_is_the_same_in_every_command(shop: Shop) -> None:
    split = (
        "    x, y = x[torch.randperm(samples)], y\n    if np.random.rand() < 2: y = y[np.random.permutation(samples)]\n"
    )
    source = SMALL_JOB.replace("    def two(output", split + "\n    def two(output", 1)
    shop.write("job.py", "import numpy as np\n" + source)
    trained = shop.train("run", "--eval.every", "4", steps=4)
    assert trained.code == 0, trained.text
    reported = [row["eval/loss"] for row in rows(shop.path / "run") if "eval/loss" in row][-1]
    for ranks in ("1", "3"):
        again = shop.run("evaluate", "run", "--ranks", ranks, "--json")
        assert again.json()["metrics"]["loss"] == pytest.approx(reported, rel=1e-6), again.text
