"""`compare` in bfloat16: a wrong gradient of one weight is found; the same training in other microbatches is not."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl

STEPS, BATCH, WRONG_FROM = 15, 32, 6
Model = Callable[[], nn.Module]
Fault = Callable[[Tensor, Tensor], Tensor]


pytestmark = pytest.mark.usefixtures("single_thread")


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Attention(nn.Module):
    """Causal attention; the bias of its key has no true gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Transformer(nn.Module):
    """Vectors or tokens in, classes out."""

    def __init__(self, *, layers: int, tokens: bool = False) -> None:
        super().__init__()
        self.into = nn.Embedding(20, 16) if tokens else nn.Linear(8, 16)
        self.tokens = tokens
        self.blocks = nn.Sequential(*(make() for _ in range(layers) for make in (Attention, Block)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x[..., 0].float() * 3).abs().long() % 20 if self.tokens else x
        result: Tensor = self.head(self.norm(self.blocks(self.into(x))).mean(1))
        return result


class Recurrent(nn.Module):
    """The last output of a GRU or LSTM."""

    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
        super().__init__()
        self.cells, self.out = kind(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.cells(x)[0][:, -1])
        return result


class Cosine(nn.Module):
    """A head of normalized weights: their magnitude and the shift of all logits have no true gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(64, 32), nn.Parameter(torch.randn(3, 32))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        features = F.normalize(torch.tanh(self.body(x.flatten(1))), dim=-1)
        return 5.0 * F.linear(features, F.normalize(self.weight, dim=-1)) + self.shift


class Convolutions(nn.Module):
    """Two convolutions with GroupNorm, in front of which one element per channel group has no true gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.c2, self.n2 = nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(torch.relu(self.n1(self.c1(x[:, None]))), 2)
        result: Tensor = self.out(F.max_pool2d(torch.relu(self.n2(self.c2(h))), 2).flatten(1))
        return result


def layers(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *modules)


def mlp() -> nn.Module:
    return layers(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))


def deep() -> nn.Module:
    inner = [part for _ in range(6) for part in (nn.ReLU(), nn.Linear(32, 32))]
    return layers(nn.Linear(64, 32), *inner, nn.Tanh(), nn.Linear(32, 3))


def narrow() -> nn.Module:
    return layers(nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 1), nn.Softplus(), nn.Linear(1, 3))


def weight_normed() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(64, 32))
    return layers(first, nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 3))


MODELS: dict[str, Model] = {
    "mlp": mlp,
    "deep": deep,
    "wide": lambda: layers(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3)),
    "normalized": lambda: layers(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3)),
    "residual": lambda: layers(nn.Linear(64, 16), Block(), Block(), Block(), nn.LayerNorm(16), nn.Linear(16, 3)),
    "narrow": narrow,
    "weight_normed": weight_normed,
    "cosine": Cosine,
    "convolutions": Convolutions,
    "transformer": lambda: Transformer(layers=2),
    "deep_transformer": lambda: Transformer(layers=4),
    "tokens": lambda: Transformer(layers=1, tokens=True),
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(BATCH, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0].mean(-1) > 0).long() + (x[:, 1].mean(-1) > 0).long()


def loss_of(net: nn.Module, x: Tensor, y: Tensor, *, native: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=not native):
        return F.cross_entropy(net(x.bfloat16() if native else x).float(), y)


def train(
    path: Path,
    model: Model,
    *,
    native: bool,
    parts: int = 1,
    spoil: Fault | None = None,
    name: str = "",
    ranks: tuple[int, int] = (0, 1),
) -> Path:
    """Train in microbatches, or as one rank of DDP; from a step on, `spoil` replaces the gradient of one parameter."""
    torch.manual_seed(0)
    net = model().bfloat16() if native else model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    run: nn.Module = nn.parallel.DistributedDataParallel(net) if ranks[1] > 1 else net
    with pl.record(run, optimizer, path):
        for step in range(1, STEPS + 1):
            x, y = (whole.chunk(ranks[1])[ranks[0]] for whole in batch(step))
            optimizer.zero_grad()
            for mine, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (loss_of(run, mine, wanted, native=native) / parts).backward()
            if spoil is not None and step >= WRONG_FROM:
                weight = net.get_parameter(name)
                assert weight.grad is not None
                other = torch.autograd.grad(loss_of(net, *batch(100 + step), native=native), weight)[0]
                weight.grad.copy_(spoil(weight.grad.clone(), other))
            optimizer.step()
    return path


FAULTS: dict[str, Fault] = {
    "negated": lambda gradient, other: -gradient,
    "zero": lambda gradient, other: gradient * 0.0,
    "noise": lambda gradient, other: (
        torch.randn(gradient.shape, generator=torch.Generator().manual_seed(9)).to(gradient) * gradient.std()
    ),
    "of another batch": lambda gradient, other: other,
    "rows reversed": lambda gradient, other: gradient.flip(0),
}
PLACES: dict[str, tuple[Model, str]] = {
    "first of an MLP": (MODELS["mlp"], "1.weight"),
    "middle of an MLP": (MODELS["mlp"], "3.weight"),
    "attention": (MODELS["transformer"], "blocks.2.v.weight"),
    "embedding": (MODELS["tokens"], "into.weight"),
    "cell": (MODELS["gru"], "cells.weight_ih_l0"),
}
CAUSES = {"negated": "a factor of -1 ", "zero": "zero in one run only"}


@pytest.mark.parametrize("native", [False, True], ids=["autocast", "native"])
@pytest.mark.parametrize("place", PLACES)
def test_a_wrong_gradient_of_one_weight_is_found(tmp_path: Path, place: str, native: bool) -> None:
    """The gradient may be a tenth of the model's largest. All faults start at a step that is named."""
    model, name = PLACES[place]
    right = train(tmp_path / "right", model, native=native)
    for what, spoil in FAULTS.items():
        found = pl.compare(right, train(tmp_path / what, model, native=native, spoil=spoil, name=name))
        assert found.exit_code == 4 and found.first_difference is not None, (what, found.text)
        assert found.first_difference["step"] == WRONG_FROM and found.first_difference["parameter"] == name, what
        assert CAUSES.get(what, "") in found.text, found.text


@pytest.mark.parametrize("native", [False, True], ids=["autocast", "native"])
@pytest.mark.parametrize("what", FAULTS)
def test_a_wrong_gradient_is_found_among_rounding(tmp_path: Path, what: str, native: bool) -> None:
    """Other microbatches change every gradient by rounding, from the first step on."""
    right = train(tmp_path / "right", mlp, native=native)
    wrong = train(tmp_path / "wrong", mlp, native=native, parts=2, spoil=FAULTS[what], name="3.weight")
    found = pl.compare(right, wrong)
    assert found.first_difference is not None, found.text
    assert (found.first_difference["step"], found.first_difference["parameter"]) == (WRONG_FROM, "3.weight")


@pytest.mark.parametrize("native", [False, True], ids=["autocast", "native"])
@pytest.mark.parametrize("model", MODELS)
def test_other_microbatches_are_no_difference(tmp_path: Path, model: str, native: bool) -> None:
    try:
        loss_of(MODELS[model]().to(torch.bfloat16 if native else torch.float32), *batch(0), native=native)
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
    one, four = (train(tmp_path / str(n), MODELS[model], native=native, parts=n) for n in (1, 4))
    found = pl.compare(one, four)
    assert found.exit_code == 0, found.text


def test_two_ranks_of_ddp_are_no_difference(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    for model, native in DDP:
        one = train(tmp_path / "one", MODELS[model], native=native)
        found = pl.compare(one, tmp_path / f"{model}-{native}")
        assert found.exit_code == 0, (model, native, found.text)
        assert found.text.startswith(f"rounding: {STEPS} steps")


DDP = [("mlp", False), ("mlp", True), ("transformer", False), ("gru", True)]


def rank_of_ddp(folder: Path) -> None:
    """Train each model as one of two ranks."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    ranks = (torch.distributed.get_rank(), 2)
    for model, native in DDP:
        train(folder / f"{model}-{native}", MODELS[model], native=native, ranks=ranks)
    torch.distributed.destroy_process_group()
    os._exit(
        0
    )  # DDP keeps its group and gloo's threads: one can end the interpreter's exit with SIGABRT (torch PR 179291)


if __name__ == "__main__":
    rank_of_ddp(Path(sys.argv[1]))
