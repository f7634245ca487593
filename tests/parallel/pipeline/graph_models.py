"""Models without a chain of blocks, not written for pipelines: manual layer calls, skips, counters, tied weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS = torch.linspace(-2, 2, 5 * 4 * 8).reshape(5, 4, 8).sin()
IMAGES = torch.linspace(-3, 3, 5 * 4 * 64).reshape(5, 4, 1, 8, 8).cos()
IDS = torch.arange(5 * 4 * 6).reshape(5, 4, 6) * 7 % 20


@dataclass(frozen=True)
class Case:
    """`loss(model, microbatch)`; `rounded` are parameters whose gradient is added up in another order."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    rounded: tuple[str, ...] = ()


class Named(nn.Module):
    """Layers that are attributes of their own, dropout and activations between them, a scale of nobody's."""

    def __init__(self, rate: float = 0.25) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.full((16,), 1.5))
        self.out = nn.Linear(16, 3)
        self.rate = rate
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = F.dropout(F.relu(self.fc1(x)), self.rate, self.training)
        first = x
        x = F.gelu(self.fc2(x))
        self.mean = self.mean * 0.5 + x.detach().mean(0) * 0.5
        x = F.dropout(self.fc3(x), self.rate, self.training).add_(1.0)
        return self.out(F.gelu(x) * self.scale + first)


class Down(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Unet(nn.Module):
    """Every picture on the way down is used again on the way up."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.one, self.two, self.middle = Down(1, 4), Down(4, 8), Down(8, 8)
        self.up_two, self.up_one = Down(16, 6), Down(10, 4)
        self.drop = nn.Dropout2d(rate)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        middle = self.drop(self.middle(F.max_pool2d(two, 2)))
        up = self.up_two(torch.cat([F.interpolate(middle, scale_factor=2.0), two], 1))
        up = self.up_one(torch.cat([F.interpolate(up, scale_factor=2.0), one], 1))
        return {"out": self.head(up), "middle": middle.mean()}


class Shared(nn.Module):
    """A tied embedding and head, one layer called twice, dropout modules in a list, a mask made on the way."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.linspace(-1, 1, 48).reshape(6, 8))
        self.mix = nn.Linear(8, 8)
        self.drops = nn.ModuleList(nn.Dropout(rate) for _ in range(2))
        self.wide = nn.Sequential(nn.Linear(8, 24), nn.Dropout(rate), nn.GELU(), nn.Linear(24, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, *, shift: float = 0.0) -> Tensor:
        mask = (ids > 2).unsqueeze(-1)
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        x = x + self.drops[0](self.mix(x)) * mask
        x = x + self.wide(x) + shift
        x = x + self.drops[1](self.mix(x)) * mask
        return self.head(self.norm(x))


class Around(nn.Module):
    """A chain of blocks, and a value that goes around it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = self.blocks
        first = one(x)
        return four(three(two(first)) + first)


def _squares(model: nn.Module, microbatch: int) -> Tensor:
    return model(INPUTS[microbatch][: 4 - microbatch % 2]).square().sum()


def _pictures(model: nn.Module, microbatch: int) -> Tensor:
    found = model(IMAGES[microbatch][: 4 - microbatch % 2])
    return (found["out"].square().mean((1, 2, 3)) + found["middle"]).sum()


def _words(model: nn.Module, microbatch: int) -> Tensor:
    ids = IDS[microbatch][:, : 6 - microbatch % 2]
    return F.cross_entropy(model(ids, shift=0.5).flatten(0, 1), ids.flatten(), reduction="sum")


CASES = {
    "named": Case(Named, _squares),
    "unet": Case(Unet, _pictures),
    "shared": Case(Shared, _words),
    "around": Case(Around, _squares),
}


def built(name: str) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return CASES[name].make()
