"""Gradients in several buckets or alone, in a world whose other ranks send what a test dictates.

A sum is in place only once it was waited for, as over a wire: whoever reads it before, or sends a copy, is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.data_parallel import reducer as replicate
from paceline.parallel.data_parallel.reducer import BucketReducer
from paceline.parallel.module_access import parameters as units
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.sharding.sharded_model import DataGroups, shard_zero12

RANKS = 3
ALONE, FULL = 200, 100  # bytes: above the first a parameter travels alone, and a bucket is full at the second


@dataclass(frozen=True, kw_only=True)
class Wired(World):
    """All other ranks send what this one sends."""

    rank: int = 0
    world_size: int = RANKS
    sent: list[Tensor] = field(default_factory=list)

    def start_all_reduce(self, tensor: Tensor, **_: Any) -> Callable[[], object]:
        self.sent.append(tensor.clone())

        def wait() -> None:
            tensor.mul_(RANKS)

        return wait


class Turned(nn.Module):
    """Its weight, and so its gradient, does not lie row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 7).T)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Net(nn.Module):
    """Two large parameters between small ones; one that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.large = nn.Linear(8, 9)
        self.turned = Turned()
        self.last = nn.Linear(7, 2)
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.large(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.turned(hidden)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_PARAMETER_BYTES", ALONE)
    monkeypatch.setattr(units, "FIRST_BUCKET_BYTES", FULL)
    monkeypatch.setattr(units, "TRANSIENT_BUCKET_BYTES", FULL)
    monkeypatch.setattr(replicate, "make_buckets", partial(units.make_buckets, bucket_bytes=FULL))


def model() -> Net:
    torch.manual_seed(2)
    return Net()


def gradients(net: Net, samples: Tensor) -> dict[str, Tensor]:
    """Of one process, added up."""
    net.zero_grad()
    net(samples).square().sum().backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return found


@pytest.mark.parametrize("divisor", [None, 6.0, torch.tensor(6.0)], ids=["whole", "divided", "by a tensor"])
@pytest.mark.parametrize("micro", [1, 2])
def test_every_gradient_is_that_of_all_ranks_in_buckets_and_alone(
    small: None, micro: int, divisor: float | Tensor | None
) -> None:
    samples, net, world = torch.randn(4, 3), model(), Wired()
    right = gradients(net, samples)
    reducer = BucketReducer(named_parameters=trainable_parameters(net), world=world)
    for _ in range(2):  # a second step uses the first one's buffers
        world.sent.clear()
        reducer.begin()
        for number, part in enumerate(samples.chunk(micro)):
            reducer.before_backward(last=number == micro - 1)
            net(part).square().sum().backward()
            reducer.after_backward()
        assert reducer.finish(divisor=divisor)
        assert len(world.sent) > 4 and sum(1 for one in world.sent if one.numel() in (63, 72)) == 2
        found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        assert set(found) == set(right), "what no rank uses has no gradient"
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient, RANKS * right[name] / (1 if divisor is None else 6), rtol=1e-5, atol=1e-6
            )
    reducer.close()


def test_replicas_of_a_rank_without_a_microbatch_get_nothing_of_the_step_before(small: None) -> None:
    """One shard, so that nobody waits for a stand-in: a replica may have no microbatch, and adds zeros."""
    net, world = model(), Wired()
    sharded = shard_zero12(
        stage=2,
        model=net,
        named_parameters=trainable_parameters(net),
        data_groups=DataGroups(all_ranks=world, shard_world=World.alone(), replica_world=world),
    )
    for samples in (torch.randn(4, 3), None):
        world.sent.clear()
        sharded.reducer.begin()
        if samples is not None:
            sharded.reducer.before_backward(last=True)
            net(samples).square().sum().backward()
            sharded.reducer.after_backward()
        assert sharded.reducer.finish(divisor=2.0)
        assert len(world.sent) > 4
        assert any(bool(one.any()) for one in world.sent) == (samples is not None)
    sharded.reducer.close()
