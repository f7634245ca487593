"""Exact mode with a fixed number of shards: a run that is killed goes on with another tp or cp, in the same bits."""

from pathlib import Path

import pytest

from tests.conftest import Shop

ZOO = Path(__file__).resolve().parents[1] / "zoo.py"
COMMON = ("--train.exact", "--train.micro_batch_size", "2", "--train.steps", "6", "--checkpoint.every", "1")


def train(shop: Shop, run: str, job: str, *words: str, ranks: int) -> int:
    ended = shop.run(
        "train", f"{ZOO}:{job}", "--ranks", str(ranks), "--run-dir", run, *COMMON, *words, "--watch.to", "jsonl",
        timeout=300,
    )  # fmt: skip
    assert ended.code in (0, 1), ended.text
    return ended.code


@pytest.mark.soak
@pytest.mark.parametrize(("axis", "setting"), [("tp", "tensor_shards"), ("cp", "sequence_shards")])
@pytest.mark.parametrize("job", ["llama", "qwen3_moe"])
def test_two_kills_and_resumes_with_other_layouts_change_no_bit(shop: Shop, job: str, axis: str, setting: str) -> None:
    shards = (f"--train.{setting}", "4")
    assert train(shop, "one", job, *shards, ranks=1) == 0
    layouts = ((f"{axis}=2", 2, 2), (f"{axis}=4", 4, 4), ("single", 1, 0))
    for attempt, (layout, ranks, killed_at) in enumerate(layouts, start=1):
        fault = ("--survive.restarts", "0", "--faults", f"kill rank=0 step={killed_at} attempt={attempt}")
        code = train(shop, "cut", job, *shards, "--layout", layout, *(fault if killed_at else ()), ranks=ranks)
        assert code == bool(killed_at)
    assert shop.digest("cut") == shop.digest("one")


@pytest.mark.soak
def test_a_resume_with_another_number_of_shards_is_refused(shop: Shop) -> None:
    fault = ("--survive.restarts", "0", "--faults", "kill rank=0 step=3")
    assert train(shop, "run", "llama", "--train.tensor_shards", "4", *fault, ranks=1) == 1
    ended = shop.run(
        "train", f"{ZOO}:llama", "--run-dir", "run", *COMMON, "--train.tensor_shards", "2", timeout=120
    )  # fmt: skip
    assert ended.code == 2
    assert "tensor_shards" in ended.text and "--allow tensor_shards" in ended.text
