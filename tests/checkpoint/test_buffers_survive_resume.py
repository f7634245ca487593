"""Buffers of every shape survive a kill and a resume on several ranks."""

import pytest

from tests.conftest import SMALL_JOB, Shop

BUFFERS = """
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("base", torch.ones(1, 2))
        self.register_buffer("wide", self.base.expand(4, 2), persistent=False)
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("listed", torch.ones(1, 2).expand(4, 2))
        self.second ="""
FORWARD = """
        if self.training:
            self.seen += 1
            self.base += 0.5
        x = x / (1 + 0.01 * self.seen + 0.001 * self.wide.sum() + 0.001 * self.listed.sum())
        return self.second("""
JOB = SMALL_JOB.replace("\n        self.second =", BUFFERS).replace("\n        return self.second(", FORWARD)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--ranks", "1"), marks=pytest.mark.soak),
        pytest.param(("--ranks", "2"), marks=pytest.mark.soak),
        pytest.param(("--ranks", "2", "--train.buffers", "mean"), marks=pytest.mark.soak),
        pytest.param(("--layout", "threads=2"), marks=pytest.mark.soak),
    ],
    ids=" ".join,
)
def test_changed_buffers_outlive_a_kill(shop: Shop, words: tuple[str, ...]) -> None:
    shop.write("job.py", JOB)
    steps = ("--train.steps", "6", "--checkpoint.every", "1", "--train.on_nonfinite", "skip")
    more = (*words, *steps, "--watch.to", "jsonl")
    ended = shop.run("train", "job.py", "--run-dir", "whole", *more)
    assert ended.code == 0, ended.text
    ended = shop.run(
        "train", "job.py", "--run-dir", "cut", *more, "--survive.restarts", "0", "--faults", "kill rank=0 step=4"
    )
    assert ended.code == 1, ended.text
    ended = shop.run("train", "job.py", "--run-dir", "cut", *more)
    assert ended.code == 0, ended.text
    assert shop.digest("cut") == shop.digest("whole")
