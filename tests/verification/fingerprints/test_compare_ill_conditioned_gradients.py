"""`compare` of recordings where the true gradient is zero, as for a convolution's bias before BatchNorm."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.errors import UsageError

STEPS, MICRO, PARTS = 12, 8, 4
BIASES = ("c1.bias", "c2.bias")
Spoil = Callable[[int, nn.Module], None]
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


pytestmark = pytest.mark.usefixtures("single_thread")


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
    model: Callable[[], nn.Module] = Net,
    autocast: bool = False,
    parts: int = PARTS,
) -> Path:
    """The gradients of the microbatches one by one, or as two ranks add them: in pairs."""
    torch.manual_seed(0)
    net = model()
    generator = torch.Generator().manual_seed(1)
    steppers = optimizers(net)
    with pl.record(net, steppers, path, every=every):
        for step in range(1, STEPS + 1):
            whole = torch.randn(MICRO * PARTS, 1, 8, 8, generator=generator)
            found = []
            for x in whole.chunk(parts):
                y = (x[:, 0].mean((1, 2)) > 0).long()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = F.cross_entropy(net(x).float(), y) / parts
                found.append(torch.autograd.grad(loss, list(net.parameters())))
            for parameter, each in zip(net.parameters(), zip(*found, strict=True), strict=True):
                in_pairs = [sum(each[k + 2 :: 4], each[k]) for k in (0, 1)] if pairs else each
                parameter.grad = sum(in_pairs[1:], in_pairs[0])
            before(step, net)
            for optimizer in steppers:
                optimizer.step()
            with torch.no_grad():
                after(step, net)
    return path


@pytest.mark.parametrize("optimizers", [sgd, adamw, biases_apart])
@pytest.mark.parametrize("every", [1, 4])
def test_a_gradient_of_rounding_alone_is_no_difference(tmp_path: Path, optimizers: Optimizers, every: int) -> None:
    one = train(tmp_path / "one", pairs=False, optimizers=optimizers, every=every)
    two = train(tmp_path / "two", pairs=True, optimizers=optimizers, every=every)
    found = pl.compare(one, two)
    assert found.exit_code == 0, found.text
    assert found.text.startswith(f"rounding: {STEPS // every} steps")
    assert found.text.endswith("not judged, because their gradient is lost in rounding: c1.bias, c2.bias")
    assert found.recordings[0]["unjudged"] == BIASES


class Fused(nn.Module):
    """Attention with one bias for query, key and value: a third of its elements has no true gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.qkv = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x[:, 0].to(self.into.weight.dtype))
        heads = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        answer: Tensor = self.head(x.mean(1)).float()
        return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizers", [sgd, adamw])
def test_a_part_without_a_gradient_and_half_precision_are_no_difference(
    tmp_path: Path, optimizers: Optimizers, dtype: torch.dtype
) -> None:
    def model() -> nn.Module:
        return Fused().to(dtype)

    one = train(tmp_path / "one", pairs=False, optimizers=optimizers, model=model)
    two = train(tmp_path / "two", pairs=True, optimizers=optimizers, model=model)
    found = pl.compare(one, two)
    assert found.exit_code == 0 and found.text.startswith(f"rounding: {STEPS} steps"), found.text
    for name, factor in (("out.weight", 2.0), ("into.weight", 1.5), ("head.bias", float("nan"))):
        wrong = train(tmp_path / name, pairs=True, optimizers=optimizers, model=model, before=scaled(name, factor))
        first = pl.compare(one, wrong).first_difference
        assert first is not None and (first["step"], first["kind"], first["parameter"]) == (3, "gradient", name)


def test_autocast_is_noted_where_the_forward_runs(tmp_path: Path) -> None:
    """Other microbatches under autocast: gradients in float32 that are as coarse as bfloat16."""
    paths = [
        train(tmp_path / str(parts), pairs=False, optimizers=adamw, model=Fused, autocast=True, parts=parts)
        for parts in (4, 2)
    ]
    found = pl.compare(*paths)
    assert found.exit_code == 0 and found.text.startswith("rounding"), found.text


def test_recordings_without_units_are_still_read(tmp_path: Path) -> None:
    path = train(tmp_path / "new", pairs=False, optimizers=sgd)
    old = tmp_path / "old"
    old.mkdir()
    lines = [json.loads(line) for line in (path / "rank-0.jsonl").read_text().splitlines()]
    for line in lines:
        for part in ("gradients", "weights"):
            line[part] = {name: entry[:5] for name, entry in line[part].items()}
    (old / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert pl.compare(path, old).text.startswith(f"bitwise: {STEPS} steps")


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"step": 1}', "7", "nonsense", '{"step": 1e999}', "\udcff"])
def test_a_damaged_line_is_named_and_a_torn_last_one_passed_over(tmp_path: Path, line: str) -> None:
    path = train(tmp_path / "new", pairs=False, optimizers=sgd, every=6)
    whole = (path / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    odd = line.encode("utf-8", "surrogateescape")
    for name, lines in (("torn", [*whole, odd]), ("damaged", [whole[0], odd + b"\n", *whole[1:]])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.jsonl").write_bytes(b"".join(lines))
    assert pl.compare(path, tmp_path / "torn").text.startswith("bitwise")
    with pytest.raises(UsageError, match=r"rank-0.jsonl: line 2 is not a step of a recording"):
        pl.compare(path, tmp_path / "damaged")


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


@pytest.mark.parametrize(("factor", "verdict"), [(1.001, "different"), (1.0 + 1e-6, "rounding")])
def test_a_gradient_a_thousandth_off_is_a_difference(tmp_path: Path, factor: float, verdict: str) -> None:
    right = train(tmp_path / "right", pairs=False, optimizers=sgd)
    wrong = train(tmp_path / "wrong", pairs=False, optimizers=sgd, before=scaled("out.weight", factor))
    found = pl.compare(right, wrong)
    assert found.recordings[0]["verdict"] == verdict
    if verdict == "different":
        assert found.first_difference is not None and found.first_difference["step"] == 3


@pytest.mark.parametrize("optimizers", [sgd, adamw])
def test_such_weights_may_part_by_the_optimizers_steps_only(tmp_path: Path, optimizers: Optimizers) -> None:
    right = train(tmp_path / "right", pairs=False, optimizers=optimizers)
    wrong = train(tmp_path / "wrong", pairs=True, optimizers=optimizers, after=moved("c1.bias", 1.0))
    first = pl.compare(right, wrong).first_difference
    assert first is not None
    assert (first["step"], first["kind"], first["parameter"]) == (4, "weight", "c1.bias")  # moved after the third step
