"""A fully sharded model in use: keys, evaluation, in-place writes, compiled blocks, parameters in bf16."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.sharding.fsdp_options import FullShardOptions
from paceline.parallel.sharding.fully_sharded import shard_zero3
from paceline.parallel.sharding.sharded_model import ShardedModel, shard_zero12
from paceline.torch_internals.private_api import tensor_version
from tests.parallel.sharding.sharding_ranks import Gpt, run, worlds_of

pytestmark = pytest.mark.one_worker  # what they share is made once


class Views(nn.Module):
    """Its blocks give views, which are written to; its output hides the tensor."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(blocks))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
            x += 1.0

        class Hidden:
            value = x

        return Hidden


def steps(model: nn.Module, sharded: ShardedModel | None, inputs: list[Tensor], rank: int, size: int) -> list[float]:
    """Plain SGD on the sum of the squares."""
    losses = []
    for x in inputs:
        if sharded is None:
            model.zero_grad()
        else:
            sharded.reducer.begin()
            sharded.reducer.before_backward(last=True)
        total = 0.0
        for own in [x[rank::size]] if sharded is not None else [x[0::2], x[1::2]]:
            out = model(own)
            out = out if isinstance(out, Tensor) else out.value
            loss = out.float().square().sum() / 50
            loss.backward()
            total += loss.item()
        losses.append(total)
        if sharded is not None:
            sharded.reducer.after_backward()
            assert sharded.reducer.finish(divisor=None)
        with torch.no_grad():
            for p in model.parameters() if sharded is None else (s.parameter for s in sharded.row_shards):
                if p.grad is not None:
                    p.sub_(2e-3 * p.grad)
        if sharded is not None:
            sharded.sync_after_update()
    return losses


def _inputs(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Gpt):
        return [torch.randint(0, 11, (4, 5), generator=generator) for _ in range(3)]
    return [torch.randn(4, 3, 4, generator=generator) for _ in range(3)]


def _made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Views({"views": 3, "hidden": 0}[kind]) if kind in ("views", "hidden") else Gpt()


def use(kind: str, rank: int, size: int) -> dict[str, Any]:
    """One rank."""
    model = _made(kind)
    keys = list(model.state_dict())
    inputs = _inputs(model)
    if kind == "compiled":
        warnings.simplefilter("ignore")  # tracing looks at `.grad` of what is no leaf
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="eager")
    asked = FullShardOptions(param_dtype=torch.bfloat16 if kind == "bf16" else None)
    data = worlds_of(rank, size, 1)
    sharded = shard_zero3(model, named_parameters=trainable_parameters(model), data_groups=data, options=asked)
    before = [tensor_version(p) for p in model.parameters()]
    same = before == [tensor_version(p) for p in model.parameters()]
    with torch.no_grad():  # leaves the model's own parameters gathered, which are old after the next update
        model(inputs[0])
    losses = steps(model, sharded, inputs, rank, size)
    with torch.no_grad():
        out = model.eval()(inputs[0])
    out = out if isinstance(out, Tensor) else out.value
    return {"losses": losses, "keys": list(model.state_dict()) == keys, "versions": same, "out": out}


KINDS = ["gpt", "views", "hidden", "compiled", "bf16"]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found = run(KINDS, ranks=2, folder=tmp_path_factory.mktemp("uses"), work=use)
    return dict(zip(KINDS, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_used_as_any_model(used: dict[str, list[Any]], kind: str) -> None:
    for answer in used[kind]:
        assert "error" not in answer, answer["trace"]
        assert answer["keys"] and answer["versions"]
    model = _made(kind)
    losses = steps(model, None, _inputs(model), 0, 1)
    with torch.no_grad():
        out = model.eval()(_inputs(model)[0])
    out = out if isinstance(out, Tensor) else out.value
    near = 5e-2 if kind == "bf16" else 1e-5
    joint = [sum(pair) for pair in zip(*(answer["losses"] for answer in used[kind]), strict=True)]
    assert joint == pytest.approx(losses, rel=near)
    assert losses[0] != pytest.approx(losses[-1], rel=2 * near)
    for answer in used[kind]:
        assert torch.allclose(answer["out"], out, rtol=near, atol=near)
        assert torch.equal(answer["out"], used[kind][0]["out"])


def transposed(kind: str, rank: int, size: int) -> str:
    """What a parameter that is not contiguous is told."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(torch.randn(3, 4).t())
    data = worlds_of(rank, size, 1)
    if kind == "zero1":
        shard_zero12(
            stage=1, model=model, named_parameters=trainable_parameters(model), data_groups=data
        ).reducer.close()
        return "taken"
    shard_zero3(model, named_parameters=trainable_parameters(model), data_groups=data)
    return ""


@pytest.mark.soak
def test_a_transposed_weight_is_refused_by_name(tmp_path: Path) -> None:
    whole, cut = run(["zero1", "fsdp"], ranks=2, folder=tmp_path, work=transposed)
    assert whole == ["taken", "taken"]
    assert all("fsdp can't shard 0.weight: its memory is not contiguous" in answer["error"] for answer in cut)
