"""`--ranks 2:3`: a run whose rank is lost continues with fewer ranks, and grows again, with the weights of one process."""

import json

import pytest

from tests.conftest import Shop
from tests.end_to_end.test_automatic_restarts import restarts

WORDS = ("--train.micro_batch_size", "1", "--train.exact", "--checkpoint.every", "5", "--train.steps", "20")
LOST = "kill rank=2 step=8; kill rank=2 step=6 attempt=2; kill rank=2 step=6 attempt=3"


@pytest.mark.cold
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_lost_rank_is_left_out_and_comes_back_with_the_same_weights(shop: Shop, layout: str) -> None:
    words = (*WORDS, "--layout", layout, "--checkpoint.memory_every", "0")
    assert shop.train("whole", *words, ranks=1).code == 0
    more = ("--ranks", "2:3", "--survive.replace_within", "0", "--faults", LOST)
    ended = shop.run("train", "job.py", "--run-dir", "cut", *words, *more, "--watch.to", "console,jsonl")
    assert ended.code == 0, ended.text
    assert "rank 2 could not be replaced; continuing with 2 ranks of 3" in ended.text
    assert "restarting with 3 ranks instead of 2" in ended.text
    assert shop.digest("cut") == shop.digest("whole")
    events = [json.loads(line) for line in (shop.path / "cut" / "events.jsonl").read_text().splitlines()]
    assert [event["ranks"] for event in events if event["event"] == "RunStarted"] == [3, 3, 3, 2, 3]
    assert len(restarts(shop, "cut")) == 3, "to grow again is no restart after a fault"


@pytest.mark.parametrize(("words", "text"), [
    (("--survive.min_ranks", "3"), "survive.min_ranks is 3, but the run has 3 ranks"),
    (("--survive.min_ranks", "2", "--layout", "dp_replicate=3"), "fits no smaller number of ranks down to 2"),
    (("--survive.min_ranks", "2", "--update", "ps"), "can't continue with fewer ranks"),
])  # fmt: skip
def test_what_can_not_shrink_is_refused_before_a_rank_starts(shop: Shop, words: tuple[str, ...], text: str) -> None:
    ended = shop.train("run", *words, ranks=3)
    assert ended.code == 2 and text in ended.err, ended.text
    assert not (shop.path / "run" / "logs").exists()
