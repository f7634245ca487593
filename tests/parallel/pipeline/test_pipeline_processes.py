"""Pipeline ranks equal one process bit for bit, under every schedule."""

from typing import Any

import pytest

from paceline.schedule import SCHEDULES
from tests.parallel.pipeline.chain_pipeline_ranks import run_ranks

SHARDED = "tests.parallel.pipeline.sharded_stage_ranks"

NANO = [f"nano:{name}:5" for name in SCHEDULES]
OTHERS = ["pair:1f1b:3", "pair:zb_h1:3", "cnn:zbv:4", "cnn:gpipe:3", "nano:zb_interleaved:3:whole"]


def check(answers: list[dict[str, Any]]) -> None:
    for rank, mine in enumerate(answers):
        for word, answer in mine.items():
            where = f"{word} on rank {rank}: {answer}"
            assert answer["losses"] and answer["forward"] and answer["last"], where
            assert not answer["missing"] and not answer["extra"], where
            apart = set(answer["differs"]) - set(answer["ties"])
            assert not apart and all(value < 1e-6 for value in answer["differs"].values()), where


def test_two_ranks_are_one_process_under_every_schedule() -> None:
    answers = run_ranks([*NANO, *OTHERS], ranks=2)
    check(answers)
    for mine in answers:
        assert all(mine[word]["bytes"] > 0 for word in NANO)
        assert mine["nano:1f1b:5"]["fired"] in ([5], [5, 10]), "hooks run once for each use in each microbatch"
        assert mine["nano:1f1b:5"]["fired"] == mine["nano:zb_h1:5"]["fired"] or len(mine["nano:zb_h1:5"]["fired"]) == 1


def test_three_ranks_are_one_process() -> None:
    check(run_ranks(["nano:1f1b:4", "nano:zb_h1:2", "pair:gpipe:3", "cnn:1f1b:4"], ranks=3))


@pytest.mark.soak
def test_four_ranks_are_one_process_under_every_schedule() -> None:
    flat = [f"nano:{name}:{m}" for name, row in SCHEDULES.items() if row.virtual == 1 for m in (2, 7)]
    check(run_ranks([*flat, "cnn:zbv:5", "cnn:interleaved:6"], ranks=4, timeout=300))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
def test_transformers_on_ranks_are_one_process(ranks: int) -> None:
    names = ("llama", "llama-tied", "gpt2", "bert", "vit", "mixtral", "t5")
    check(run_ranks([f"{n}:{s}:3" for n in names for s in ("1f1b", "zb_h1")], ranks=ranks, timeout=300))


@pytest.mark.soak
def test_stages_that_are_sharded_or_compiled_inside_are_one_process() -> None:
    words = [
        f"{name}:{how}"
        for name in ("nano:1f1b", "pair:1f1b", "nano:zbv")
        for how in ("plain", "fsdp", "compile", "fsdp+compile")
    ]
    for rank, mine in enumerate(run_ranks(words, ranks=4, timeout=300, module=SHARDED)):
        for word, answer in mine.items():
            assert answer["number"] and not answer["apart"] and not answer["missing"], (
                f"{word} on rank {rank}: {answer}"
            )
