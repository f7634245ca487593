"""Backward in two halves gives the gradients of the whole bit for bit and computes no product twice."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from paceline.step.pipeline.split_backward import backward_input, backward_weight
from tests.parallel.pipeline.chain_models import Block


class Twice(nn.Module):
    """One weight used at two places of the chain, a norm, an output that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.alone = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(self.b(torch.tanh(self.a(x))))
        return self.norm(torch.relu(self.a(y))), self.alone * 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mix(x, x, x, need_weights=False)[0]
        return self.conv(y.transpose(1, 2)).transpose(1, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(Block(8, 0.0), Block(8, 0.0)),
    "twice": Twice,
    "attention": Attention,
}


def run(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    out = model(x)
    outputs = list(out) if isinstance(out, tuple) else [out]
    return outputs, [torch.cos(torch.arange(o.numel(), dtype=o.dtype)).view_as(o) for o in outputs]


@pytest.mark.parametrize("name", list(MODELS))
def test_two_halves_are_the_whole(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    x = torch.randn(2, 5, 8, requires_grad=True)
    for _ in range(2):
        torch.autograd.backward(*run(model, x))
    right = {n: p.grad.clone() for n, p in model.named_parameters()}
    right_input, x.grad = x.grad.clone(), None
    model.zero_grad()
    fired: dict[str, int] = {}
    for n, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, n=n: fired.update({n: fired.get(n, 0) + 1}))
    total, rests = torch.zeros_like(x), []
    for _ in range(2):
        gradients, rest = backward_input(*run(model, x), [x])
        total += gradients[0]
        rests.append(rest)
    assert all(p.grad is None for p in model.parameters()) and x.grad is None, "nothing of the weights yet"
    for rest in rests:
        backward_weight(rest)
    assert torch.equal(total, right_input)
    for n, p in model.named_parameters():
        assert torch.equal(p.grad, right[n]), n
    assert fired == dict.fromkeys(right, 2)


def test_no_product_is_computed_twice() -> None:
    model = MODELS["blocks"]()
    x = torch.randn(4, 8, requires_grad=True)

    def products(work: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            work()
        return sum(
            event.count for event in seen.key_averages() if event.key in ("aten::mm", "aten::addmm", "aten::bmm")
        )

    outputs, gradients = run(model, x)
    whole = products(lambda: torch.autograd.backward(outputs, gradients))
    rests = []
    outputs, gradients = run(model, x)
    first = products(lambda: rests.append(backward_input(outputs, gradients, [x])[1]))
    second = products(lambda: backward_weight(rests[0]))
    assert (first, second, first + second) == (whole // 2, whole // 2, whole)


def test_a_first_stage_has_weights_only() -> None:
    model = MODELS["blocks"]()
    outputs, gradients = run(model, torch.randn(4, 8))
    found, rest = backward_input(outputs, gradients, [])
    assert found == [] and all(p.grad is None for p in model.parameters())
    backward_weight(rest)
    assert all(p.grad is not None for p in model.parameters())
