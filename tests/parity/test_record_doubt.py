"""`compare` of recordings where a true gradient is zero: a convolution's bias before BatchNorm is rounding alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl

STEPS, MICRO, PARTS = 12, 8, 4
BIASES = ("c1.bias", "c2.bias")
Spoil = Callable[[int, nn.Module], None]
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Two convolutions with a bias before BatchNorm, and a branch that is scaled down to a millionth."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c2, self.n2 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.out = nn.Linear(64, 4)
        self.faint = nn.Linear(64, 4)
        nn.init.zeros_(self.c2.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(torch.relu(self.n1(self.c1(x))), 2)
        h = F.max_pool2d(torch.relu(self.n2(self.c2(h))), 2).flatten(1)
        answer: Tensor = self.out(h) + 1e-6 * self.faint(x.flatten(1))
        return answer


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def biases_apart(model: nn.Module) -> list[torch.optim.Optimizer]:
    weights, biases = ([p for n, p in model.named_parameters() if (n in BIASES) == own] for own in (False, True))
    return [torch.optim.AdamW(weights, lr=1e-2), torch.optim.AdamW(biases, lr=1e-2)]


def nothing(step: int, model: nn.Module) -> None:
    """No fault."""


def train(
    path: Path,
    *,
    pairs: bool,
    optimizers: Optimizers,
    before: Spoil = nothing,
    after: Spoil = nothing,
    every: int = 1,
) -> Path:
    """The gradients of four microbatches one by one, or as two ranks add them: in pairs."""
    torch.manual_seed(0)
    model = Net()
    generator = torch.Generator().manual_seed(1)
    steppers = optimizers(model)
    with pl.record(model, steppers, path, every=every):
        for step in range(1, STEPS + 1):
            parts = []
            for _ in range(PARTS):
                x = torch.randn(MICRO, 1, 8, 8, generator=generator)
                y = (x[:, 0].mean((1, 2)) > 0).long()
                parts.append(torch.autograd.grad(F.cross_entropy(model(x), y) / PARTS, list(model.parameters())))
            for parameter, (a, b, c, d) in zip(model.parameters(), zip(*parts, strict=True), strict=True):
                parameter.grad = (a + c) + (b + d) if pairs else ((a + b) + c) + d
            before(step, model)
            for optimizer in steppers:
                optimizer.step()
            with torch.no_grad():
                after(step, model)
    return path


@pytest.mark.parametrize("optimizers", [sgd, adamw, biases_apart])
@pytest.mark.parametrize("every", [1, 4])
def test_a_gradient_of_rounding_alone_is_no_difference(tmp_path: Path, optimizers: Optimizers, every: int) -> None:
    one = train(tmp_path / "one", pairs=False, optimizers=optimizers, every=every)
    two = train(tmp_path / "two", pairs=True, optimizers=optimizers, every=every)
    found = pl.compare(one, two)
    assert found.exit_code == 0, found.text
    assert found.text.startswith(f"rounding: {STEPS // every} steps")
    assert found.text.endswith("not judged, as their gradient is lost in rounding: c1.bias, c2.bias")
    assert found.recordings[0]["unjudged"] == BIASES


def scaled(name: str, factor: float) -> Spoil:
    def spoil(step: int, model: nn.Module) -> None:
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        if step == 3:
            gradient *= factor

    return spoil


def replaced(name: str, size: float) -> Spoil:
    def spoil(step: int, model: nn.Module) -> None:
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        if step == 3:
            gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(2)) * size)

    return spoil


def moved(name: str, by: float) -> Spoil:
    def spoil(step: int, model: nn.Module) -> None:
        if step == 3:
            parameter = model.get_parameter(name)
            parameter += by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))

    return spoil


def test_a_fault_in_such_a_gradient_is_found_where_it_has_a_size(tmp_path: Path) -> None:
    right = train(tmp_path / "right", pairs=False, optimizers=adamw)
    faults: dict[str, tuple[str, Spoil]] = {
        "real size": ("c1.bias", replaced("c1.bias", 1e-3)),
        "not a number": ("c1.bias", scaled("c1.bias", float("nan"))),
        "twice a true but faint one": ("faint.weight", scaled("faint.weight", 2.0)),
        "a third of another": ("c2.weight", scaled("c2.weight", 1 / 3)),
    }
    for number, (what, (name, spoil)) in enumerate(faults.items()):
        wrong = train(tmp_path / str(number), pairs=True, optimizers=adamw, before=spoil)
        first = pl.compare(right, wrong).first_difference
        assert first is not None, what
        assert (first["step"], first["kind"], first["parameter"]) == (3, "gradient", name), what


@pytest.mark.parametrize("optimizers", [sgd, adamw])
def test_such_weights_may_part_by_the_optimizers_steps_only(tmp_path: Path, optimizers: Optimizers) -> None:
    right = train(tmp_path / "right", pairs=False, optimizers=optimizers)
    wrong = train(tmp_path / "wrong", pairs=True, optimizers=optimizers, after=moved("c1.bias", 1.0))
    first = pl.compare(right, wrong).first_difference
    assert first is not None
    assert (first["step"], first["kind"], first["parameter"]) == (4, "weight", "c1.bias")  # moved after the third step
