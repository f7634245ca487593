"""Exact mode gives one digest for any number of ranks and through a stop and resume on another number."""

import json

import pytest

from tests.conftest import Shop

COMMON = ("--train.exact", "--train.micro_batch_size", "5", "--job.norm", "true", "--job.dropout", "0.2")


@pytest.fixture
def alone(shop: Shop) -> str:
    ended = shop.train("one", *COMMON, ranks=1)
    assert ended.code == 0, ended.text
    return shop.digest("one")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_gives_the_one_process_weights(shop: Shop, alone: str, ranks: int) -> None:
    ended = shop.train("many", *COMMON, ranks=ranks)
    assert ended.code == 0, ended.text
    assert shop.digest("many") == alone


@pytest.mark.soak
def test_kills_and_resumes_on_other_numbers_of_ranks_change_no_bit(shop: Shop, alone: str) -> None:
    for ranks, step in ((2, 3), (3, 5), (1, 8), (4, 11)):
        fault = f"kill rank={ranks - 1} step={step} attempt={_next(shop)}"
        ended = shop.train(
            "cut", *COMMON, "--checkpoint.every", "1", "--survive.restarts", "0", "--faults", fault, ranks=ranks
        )
        assert ended.code == 1, ended.text
        assert f"at step {step}" in ended.text and f"rank {ranks - 1}" in ended.text
    assert shop.train("cut", *COMMON, ranks=2).code == 0
    assert shop.digest("cut") == alone


def test_accumulation_and_another_dealing_change_no_bit(shop: Shop, alone: str) -> None:
    assert shop.train("workers", *COMMON, "--data.workers", "1", ranks=2).code == 0
    assert shop.digest("workers") == alone


@pytest.mark.soak
def test_it_differs_where_it_must(shop: Shop, alone: str) -> None:
    ended = shop.train("seed", *COMMON, "--seed", "1", ranks=2)
    assert ended.code == 0, ended.text
    assert shop.digest("seed") != alone


def _next(shop: Shop) -> int:
    return len(list((shop.path / "cut" / "logs").glob("attempt-*"))) + 1 if (shop.path / "cut").exists() else 1


@pytest.mark.soak
def test_metrics_and_losses_are_the_same_text(shop: Shop, alone: str) -> None:
    shop.train("two", *COMMON, "--log.every", "1", ranks=2)
    shop.train("again", *COMMON, "--log.every", "1", ranks=1)
    keep = ("step", "loss", "grad_norm", "eval/loss", "eval/accuracy")
    lines = [
        [{k: v for k, v in json.loads(line).items() if k in keep} for line in path.read_text().splitlines()]
        for path in (shop.path / "two" / "metrics.jsonl", shop.path / "again" / "metrics.jsonl")
    ]
    assert lines[0] == lines[1] and len(lines[0]) > 12
