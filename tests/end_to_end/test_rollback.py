"""After a spike or a step that is not finite, the run goes back, and ends as one without the samples of this step."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError
from paceline.trainer.saving.rollback import read_left_out_steps
from tests.conftest import SMALL_JOB, Shop

WORDS = ("--train.micro_batch_size", "3", "--checkpoint.every", "8", "--job.dropout", "0.1", "--eval.every", "10")
BAD = SMALL_JOB.replace(
    "    return pl.Job(",
    "    if os.environ.get('BAD'): x[31] = float(os.environ['BAD'])  # one bad sample\n    return pl.Job(",
)


def skipped(shop: Shop, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shop.path / run / "skipped.jsonl").read_text().splitlines()]


def train(shop: Shop, run: str, *words: str, bad: str = "", steps: int = 40, ranks: int = 2, code: int = 0) -> str:
    """Train the job with its bad sample; what was printed."""
    ended = shop.run(
        "train", "job.py", "--ranks", str(ranks), "--run-dir", run, "--train.steps", str(steps), *WORDS, *words,
        "--watch.to", "console,jsonl", environ={"BAD": bad},
    )  # fmt: skip
    assert ended.code == code, ended.text
    return ended.text


@pytest.fixture
def small(shop: Shop) -> Shop:
    shop.write("job.py", BAD)
    return shop


def start_with(shop: Shop, run: str, records: list[dict[str, Any]]) -> None:
    """Make a run folder that leaves out these steps from its start."""
    folder = shop.path / run
    folder.mkdir(parents=True)
    (folder / "skipped.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("layout", ["ddp", pytest.param("fsdp", marks=pytest.mark.soak)])
def test_a_spike_ends_as_a_run_that_leaves_out_its_samples(small: Shop, layout: str) -> None:
    shared = ("--layout", layout)
    text = train(small, "run", *shared, "--train.on_spike", "rollback", "--faults", "spike rank=1 step=28")
    records = skipped(small, "run")
    assert [record["step"] for record in records] == [28] and len(records[0]["samples"]) == 12
    assert "step 28: the loss is" in text and "its 12 samples are left out; restarted in" in text, text
    assert "step 28 is left out, as skipped.jsonl says" in text
    start_with(small, "reference", records)
    train(small, "reference", *shared)
    assert small.digest("run") == small.digest("reference")
    train(small, "whole", *shared)
    assert small.digest("whole") != small.digest("run")


def test_a_bad_sample_is_left_out_each_time_it_comes(small: Shop) -> None:
    words = ("--train.on_nonfinite", "rollback")
    train(small, "run", *words, bad="nan", steps=12)
    records = skipped(small, "run")  # the sample comes once in each of the three epochs
    assert len(records) == 3 and all(31 in record["samples"] for record in records)
    start_with(small, "reference", records)
    train(small, "reference", bad="nan", steps=12)
    assert small.digest("run") == small.digest("reference")


def test_too_many_rollbacks_end_the_run(small: Shop) -> None:
    text = train(small, "run", "--train.on_nonfinite", "rollback", "--train.max_rollbacks", "2", bad="nan", steps=12,
                 code=1)  # fmt: skip
    assert len(skipped(small, "run")) == 2
    assert "NonFiniteError" in text and "train.max_rollbacks is 2; left out already: 2 steps" in text, text


def test_a_spike_is_skipped_or_ends_the_run(small: Shop) -> None:
    spike = ("--faults", "spike rank=0 step=28")
    text = train(small, "stopped", "--train.on_spike", "stop", *spike, code=1)
    assert "FAILED at step 28" in text and "SpikeError" in text and "sigma above the median" in text, text
    train(small, "skipped", "--train.on_spike", "skip", *spike)
    start_with(small, "reference", [{"step": 28}])
    train(small, "reference")
    assert small.digest("skipped") == small.digest("reference")


@pytest.mark.soak
def test_a_resumed_run_decides_as_an_uninterrupted_one(small: Shop) -> None:
    words = ("--train.on_spike", "skip", "--train.spike_sigma", "3")
    train(small, "whole", *words, "--faults", "spike rank=0 step=42", steps=50)
    train(small, "halves", *words, steps=40)
    train(small, "halves", *words, "--faults", "spike rank=0 step=42 attempt=2", steps=50)
    train(small, "plain", *words, steps=50)
    assert small.digest("whole") == small.digest("halves") != small.digest("plain")


def test_asynchronous_updates_are_refused(small: Shop) -> None:
    text = train(small, "run", "--update", "local,every=4", "--train.on_spike", "rollback", code=2)
    assert "--train.on_spike rollback with --update local is not supported" in text
    assert not (small.path / "run" / "skipped.jsonl").exists()


@pytest.mark.parametrize(
    "line", ['{"stp": 22}', '{"step": true}', '{"step": 0}', '{"step": 1e999}', '{"step": 2', "[" * 9999, "\udcff"]
)
def test_a_damaged_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "skipped.jsonl"
    path.write_bytes(b'{"step": 4}\n' + line.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"line 2 of .*skipped\.jsonl does not name a step"):
        read_left_out_steps(path)


def test_a_damaged_file_ends_the_command_before_it_trains(small: Shop) -> None:
    start_with(small, "run", [{"other": 1}])
    text = train(small, "run", code=2)
    assert "line 1 of run/skipped.jsonl does not name a step to leave out" in text, text


def test_a_file_that_is_not_there_leaves_out_nothing(tmp_path: Path) -> None:
    assert read_left_out_steps(tmp_path / "skipped.jsonl") == []
    with pytest.raises(CheckpointError, match="can't be read"):
        read_left_out_steps(tmp_path)


def test_a_skipped_step_is_reported(small: Shop) -> None:
    text = train(small, "run", "--train.on_nonfinite", "skip", bad="nan", steps=5)
    assert "is skipped on all ranks: the loss is nan" in text


def test_a_spike_in_exact_mode_is_found(small: Shop) -> None:
    text = train(small, "run", "--train.exact", "--train.on_spike", "stop", "--faults", "spike rank=1 step=28", code=1)
    assert "SpikeError" in text and "step 28" in text, text


def test_a_loss_that_has_changed_for_good_ends_the_run(shop: Shop) -> None:
    """Not one step of it would be trained, if the spikes were skipped for ever."""
    scaled = SMALL_JOB.replace("return F.cross", "return (50.0 if next(calls) > 60 else 1.0) * F.cross")
    shop.write("job.py", scaled + "import itertools\ncalls = itertools.count()\n")
    text = train(shop, "run", "--train.on_spike", "skip", code=1)
    assert "after 10 skipped steps in a row" in text, text
