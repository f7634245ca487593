"""A run notes unused parameters and buffers that a forward changes."""

import pytest

from tests.conftest import SMALL_JOB, Shop

ODD = SMALL_JOB.replace(
    "        self.second = nn.Linear(16, 4)\n",
    "        self.second = nn.Linear(16, 4)\n        self.spare = nn.Linear(3, 3)\n"
    "        self.register_buffer('calls', torch.zeros(()))\n",
).replace("    def forward(self, x):\n", "    def forward(self, x):\n        self.calls += 1\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_unused_parameters_and_changed_buffers_are_named(shop: Shop, ranks: int) -> None:
    shop.write("job.py", ODD)
    ended = shop.train("run", "--job.norm", "true", ranks=ranks, steps=12)
    assert ended.code == 0, ended.text
    assert ended.out.count("no gradient reached spare.weight, spare.bias in the first step") == 1
    assert ended.out.count("the forward changes calls; every rank gets rank 0's value") == int(ranks > 1)
    assert "buffers: fold, running statistics are folded" in ended.out


def test_nothing_is_told_of_a_plain_model(shop: Shop) -> None:
    ended = shop.train("run", ranks=2, steps=3)
    assert "warning" not in ended.out and "buffers:" not in ended.out and ended.code == 0
