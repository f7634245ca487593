"""A block called twice in a forward draws new random numbers; a forward that backward recomputes repeats them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.process_group import World
from paceline.parallel.batchnorm.running_statistics import StatisticsRecorder
from paceline.torch_internals.rng import RandomStreams


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + torch.tanh(self.linear(x)))


class Repeated(nn.Module):
    """Two blocks, run `times` times over (ALBERT's and the universal transformer's way)."""

    def __init__(self, *, times: int, remat: dict[str, Any] | None, whole: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.times, self.remat, self.whole = times, remat, whole
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.twice] if self.whole else list(self.blocks)
        for _ in range(self.times):
            for part in parts:
                x = part(x) if self.remat is None else checkpoint(part, x, **self.remat)
                self.masks.append(x.detach() == 0)
        return x

    def twice(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run(**how: Any) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(3)
    model = Repeated(**how)
    streams = RandomStreams(seed=5)
    streams.attach(model)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for microbatch in range(2):
        streams.enter(step=4, microbatch=microbatch)
        model(x).square().sum().backward()
    return model.masks, [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def test_each_call_has_its_own_mask() -> None:
    masks, _ = run(times=3, remat=None)
    assert len(masks) == 12
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_is_run_again_draws_what_it_drew(times: int, reentrant: bool, whole: bool) -> None:
    _, right = run(times=times, remat=None, whole=whole)
    _, found = run(times=times, remat={"use_reentrant": reentrant}, whole=whole)
    for ours, theirs in zip(found, right, strict=True):  # the reentrant way adds a weight's gradients in another order
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if reentrant else 0, atol=1e-4 if reentrant else 0)


def test_without_the_generators_state_a_block_called_once_is_right_too() -> None:
    _, right = run(times=1, remat=None)
    _, found = run(times=1, remat={"use_reentrant": False, "preserve_rng_state": False})
    for ours, theirs in zip(found, right, strict=True):
        assert torch.equal(ours, theirs)


class Normed(nn.Module):
    """Checkpointed blocks, of which one ends in a norm: its second forward is left before it is done."""

    def __init__(self, remat: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.remat = remat

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            x = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)  # type: ignore[assignment]
        return x


def test_norms_that_are_run_again_are_counted_as_in_plain_torch() -> None:
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))

    def train(tape: bool) -> nn.Module:
        torch.manual_seed(3)
        model = Normed(remat=True)
        tapes = StatisticsRecorder(model=model, world=World.alone()) if tape else None
        for _ in range(3):
            if tapes:
                tapes.begin_step()
            for index in range(2):
                if tapes:
                    tapes.set_microbatch(index)
                model(x[index * 6 : index * 6 + 6]).square().sum().backward()
            if tapes:
                tapes.fold(num_micro=2)
        return model

    found, right = train(True), train(False)
    assert [m.momentum for m in found.modules() if isinstance(m, nn.BatchNorm1d)] == [0.1, 0.1]
    for name, value in right.named_buffers():
        torch.testing.assert_close(found.get_buffer(name), value)
