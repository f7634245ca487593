"""Random numbers drawn on a part of a sequence are those of one process, or the model is refused."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.rank_threads import thread_worlds
from paceline.errors import LayoutError
from paceline.parallel.context_parallel import function_mode as context_mode
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.context_parallel.context_parallel_check import check_context
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding

LENGTH = 19


@pytest.fixture(autouse=True)
def _one_thread_a_rank() -> Iterator[None]:
    """Ranks are threads here, and a pool for each is slower than none."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Attention with a bias for each key, and a place where a test puts something in."""

    def __init__(self, drawn: Callable[["Net", Tensor], Tensor] = lambda _, x: x) -> None:
        super().__init__()
        self.embed, self.q, self.k, self.v = (
            nn.Embedding(40, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
        )
        self.head, self.drawn, self.bias = nn.Linear(16, 40), drawn, lambda b: b
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.drawn(self, x) if self.training else x
        keys = F.linear(x, self.k.weight) + self.bias(self.k.bias.expand_as(x))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (self.q(x), keys, self.v(x)))
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def check(model: nn.Module, ranks: int = 2) -> None:
    ids = torch.randint(0, 40, (3, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    check_context(
        model=model,
        batch=(ids[:, :-1], ids[:, 1:]),
        sequence={"0": 1},
        ranks=ranks,
        forward=lambda model, batch: model(batch[0]),
        loss=lambda out, batch: (
            F.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="sum"),
            batch[1].numel(),
        ),
    )


class ByOwnPlace(torch.autograd.Function):
    """Right outputs, and a gradient that counts each position as often as its place in the rank's part says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.linspace(1.0, 2.0, grads[0].shape[1], dtype=torch.float64)[:, None]


def test_a_gradient_that_cancels_is_no_fault_and_a_fault_in_it_is() -> None:
    """The true gradient of a key's bias is zero: what is computed has the rounding of what cancels in it."""
    torch.manual_seed(0)
    model = Net()
    nn.init.normal_(model.head.weight, std=30.0)
    check(model)
    model.bias = ByOwnPlace.apply
    with pytest.raises(LayoutError, match=r"the gradients of k\.bias from parts of a sequence do not add up"):
        check(model)


def flat(_: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x.flatten(0, 1), 0.3).view_as(x)


def wide(_: nn.Module, x: Tensor) -> Tensor:
    """As wide as a rank's part is long."""
    return x + F.dropout(x.flatten(0, 1)[:, :10], 0.3).mean(1).view(*x.shape[:2], 1)


def layer_drop(_: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rand([]) * np.random.rand() + x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5)


def counted(model: Net, x: Tensor) -> Tensor:
    model.calls += 1
    return F.dropout(x * model.calls, 0.1)


def again(_: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(F.gelu, x, use_reentrant=False)


@pytest.mark.parametrize("drawn", [flat, wide, layer_drop, counted, again])
def test_draws_that_are_one_process_s_pass(drawn: Any) -> None:
    before = torch.get_rng_state()
    model = Net(drawn)
    torch.set_rng_state(before)
    check(model)
    assert torch.equal(before, torch.get_rng_state()) and not model.calls


def tokens(_: nn.Module, x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape[:2]) > 1e-9)[..., None]  # so rare that no output shows it here


def noise(_: nn.Module, x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def by_numpy(_: nn.Module, x: Tensor) -> Tensor:
    return x + torch.as_tensor(np.random.rand(x.shape[1]))[:, None] * 1e-12


def mixed(_: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(x, 0.1) + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (tokens, r"random numbers of shape \(3, (9|10)\) on a part of the sequence, where one process draws \(3, 19\)"),
        (noise, r"random numbers of shape \(3, \d+, 16\) on a part"),
        (by_numpy, r"draws a different number of random numbers on a part"),
        (mixed, r"in training mode, this model gives different outputs if it is split along the sequence"),
    ],
)
def test_what_training_alone_does_is_refused(drawn: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        check(Net(drawn))
    line = drawn.__code__.co_firstlineno + 1
    assert drawn not in (tokens, noise) or caught.value.where == f"{__file__}:{line}"


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_training_runs_again_by_itself_is_answered_there_too(reentrant: bool, rate: float) -> None:
    check(Again(reentrant=reentrant, rate=rate))


class Again(Net):
    """Checkpoints a part that is no module: attention, and dropout that must be drawn as in the first run."""

    def __init__(self, *, reentrant: bool, rate: float) -> None:
        super().__init__()
        self.reentrant, self.rate = reentrant, rate

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(checkpoint(self.seen, x, use_reentrant=self.reentrant) if self.training else self.seen(x))

    def seen(self, x: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(*(f(x)[:, None] for f in (self.q, self.k, self.v)))[:, 0]
        return F.dropout(torch.tanh(seen), self.rate, self.training)


def test_a_second_run_that_sees_the_part_alone_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContextParallel, "backward", lambda self, part: nullcontext())
    for reentrant in (False, True):
        with pytest.raises(LayoutError, match=r"these behave differently there|from parts of a sequence do not add"):
            check(Again(reentrant=reentrant, rate=0.0))


def test_dropout_of_flattened_positions_is_one_process_s() -> None:
    x = torch.randn(3, 11, 5)
    torch.manual_seed(7)
    wanted, following = F.dropout(x.flatten(0, 1), 0.4), torch.rand(1)
    cut, parts = SequenceSharding(length=11, ranks=2), []
    for rank in range(2):
        part = cut.shard(x, dim=1, rank=rank).flatten(0, 1)
        torch.manual_seed(7)
        over = thread_worlds(replicas=2)[rank]
        with context_mode.ContextParallelMode(world=over, sharding=cut, model=nn.Identity(), num_sequences=3):
            parts.append(F.dropout(part, 0.4, inplace=True).unflatten(0, (3, -1)))
        assert torch.rand(1) == following
    assert torch.equal(cut.join(parts, dim=1).flatten(0, 1), wanted)


def test_a_bias_from_the_distance_of_positions_is_refused_by_name() -> None:
    """Its (length, length, heads) has the sequence twice: parts of unequal length do not join."""

    class Slanted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Embedding(2 * LENGTH, 16)

        def forward(self, ids: Tensor) -> Tensor:
            places = torch.arange(ids.shape[1])
            slant = self.slope(places[None] - places[:, None] + LENGTH).sum(-1)
            x = self.embed(ids)
            return self.head((x @ x.mT + slant).softmax(-1) @ self.v(x))

    with pytest.raises(LayoutError, match=r"the first one that differs comes from the module slope \(Embedding\)"):
        check(Slanted())
