"""Initial weights have one digest in all layouts, and each rank builds only its shards."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoint.tensor_bytes import weights_digest
from paceline.comm.process_group import World
from paceline.errors import UsageError
from paceline.launch.launcher import LaunchRequest, start
from paceline.parallel.initialization.deferred_init import SpecsForModel, build_full_model, defer_init, fill_model
from paceline.parallel.initialization.init_tape import Unrecordable
from paceline.parallel.initialization.meta_model import describe_model, named_tensors, record_model, tensor_bytes
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.run_folder.run_folder import RunFolder
from paceline.torch_internals.rng import seed_all, stream_key
from tests.parallel.initialization.initial_weights_rank import MODELS, SEED, plain
from tests.zoo import JOBS

NEAR, FAR = 1 << 10, 1 << 40


def build_parts(
    build: Callable[[], nn.Module], *, seed: int, world: World, wanted: SpecsForModel, limit_bytes: int
) -> tuple[nn.Module, dict[str, Tensor], tuple[str, ...]]:
    """Return the model, filled with tensors that this rank holds whole, this rank's parts of all tensors, and notes."""
    made = defer_init(build, seed=seed, world=world, limit_bytes=limit_bytes)
    values, notes = made.values(wanted(made.model))
    fill_model(made.model, values)
    return made.model, values, (*made.notes, *notes)


def digest(tensors: Any) -> str:
    return weights_digest(sorted(dict(tensors).items()))


def ranks_build(folder: Path, *, ranks: int, nodes: int = 0) -> list[dict[str, Any]]:
    """What each rank says; its values lie beside."""
    payload = {"jobs": list(MODELS), "limits": [FAR, NEAR], "answer": f"{folder}/rank-", "nodes": nodes}
    outcome = start(
        LaunchRequest(
            ranks=ranks,
            run=RunFolder(folder / "run"),
            entry="tests.parallel.initialization.initial_weights_rank:run",
            payload=payload,
        )
    )
    assert outcome.exit_code == 0, outcome.failure
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def assembled(folder: Path, told: list[dict[str, Any]], job: str, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors from everybody's parts; what nobody has written stays a number that no init gives."""
    whole = {name: torch.full_like(tensor, 77) for name, tensor in like.items()}
    for rank, found in enumerate(told):
        values = load_file(f"{folder}/rank-{job}-{rank}")
        for name, text in found[job]["parts"].items():
            part = ShardSpec.from_json(text)
            assert (name in values) == (part.local_shape is not None)
            if part.local_shape is not None:
                part.write_into(values[name], full_tensor=whole[name])
    return whole


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", ":".join([root, *(p for p in sys.path if p)]))


@pytest.mark.parametrize("nodes", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_parts_put_together_are_one_process_and_nobody_holds_the_whole(tmp_path: Path, nodes: int) -> None:
    """Below the limit those of the plain build, which the first rank of each node holds; above it, nobody."""
    told = ranks_build(tmp_path, ranks=4 if nodes else 3, nodes=nodes)
    for job in JOBS:
        like = detached(plain(job))
        whole = sum(tensor.nbytes for tensor in like.values())
        assert digest(assembled(tmp_path, told, f"{job}-{FAR}", like)) == digest(like), job
        drawn = detached(build_full_model(lambda job=job: plain(job), seed=SEED, limit_bytes=NEAR))
        assert digest(assembled(tmp_path, told, f"{job}-{NEAR}", like)) == digest(drawn), job
        for rank, found in enumerate(told):
            below, above = found[f"{job}-{FAR}"], found[f"{job}-{NEAR}"]
            assert below["notes"] == [] and "init.limit" in above["notes"][0]
            assert below["most"] < whole or rank in (0, nodes), f"{job}: rank {rank} had {below['most']} of {whole}"
            assert above["most"] < whole, f"{job}: rank {rank} had {above['most']} of {whole}"
    for found in told:
        assert len(found["other"]) == 2 and all("bias on rank 1" in what for what in found["other"])
    for job in ("drawn", "uneven"):
        like = detached(plain(job))
        assert digest(assembled(tmp_path, told, f"{job}-{FAR}", like)) == digest(like), job
    for rank, found in enumerate(told):
        below, above = found[f"drawn-{FAR}"], found[f"drawn-{NEAR}"]
        assert ".rate is " in below["notes"][0] and below["rate"] == plain("drawn").rate, rank
        assert above["rate"] == told[0][f"drawn-{NEAR}"]["rate"] != below["rate"]


@pytest.mark.parametrize("job", list(JOBS))
def test_drawn_alone_values_are_of_the_same_kind(job: str) -> None:
    """What is not drawn is equal bit for bit; what is drawn has the plain build's mean and spread."""
    like = detached(plain(job))
    found = detached(build_full_model(lambda: plain(job), seed=SEED, limit_bytes=NEAR))
    assert list(found) == list(like)
    drawn = 0
    for name, tensor in like.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        if torch.equal(found[name], tensor):
            continue
        drawn += 1
        assert tensor.is_floating_point() and tensor.unique().numel() > 1, f"{name} is not drawn in a plain build"
        assert 0.6 < float(found[name].std() / tensor.std()) < 1.6, name
    assert drawn > 3


@pytest.mark.parametrize("limit", [NEAR, FAR])
@pytest.mark.parametrize("job", list(JOBS))
def test_the_model_is_the_users_own(job: str, limit: int) -> None:
    """Types, ties, attributes, and a forward."""
    model, values, _ = build_parts(
        lambda: plain(job), seed=SEED, world=World.alone(), wanted=lambda _: {}, limit_bytes=limit
    )
    assert describe_model(model) == describe_model(plain(job))
    assert model.state_dict().keys() == plain(job).state_dict().keys()
    assert not any(tensor.is_meta for tensor in named_tensors(model).values())
    assert all(values[name].data_ptr() == tensor.data_ptr() for name, tensor in named_tensors(model).items())


class Odd(nn.Module):
    """What constructors do beside drawing."""

    def __init__(self) -> None:
        super().__init__()
        self.ortho = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
        self.copied = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.copied.weight.copy_(self.square)
            self.copied.weight[0] = 0
            self.copied.weight.data.mul_(3)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False)
        self.lstm = nn.LSTM(3, 5, 2)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.listed = torch.arange(4).tolist()
        self.table = torch.arange(6).float().cos()
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool(), persistent=False)
        self.register_buffer("alias", self.square.detach()[0])


def odd() -> nn.Module:
    seed_all(stream_key(SEED, "build"))
    return Odd()


def test_operations_that_mix_tensors_are_done_again_with_what_they_need() -> None:
    like = odd()
    model = build_full_model(odd, seed=SEED, limit_bytes=NEAR)
    assert isinstance(model, Odd) and isinstance(like, Odd)
    with torch.no_grad():
        torch.testing.assert_close(model.square @ model.square.T, torch.eye(6), atol=1e-5, rtol=0)
        assert torch.equal(model.copied.weight[1:], 3 * model.square[1:]) and not model.copied.weight[0].any()
        first, second = (layer.state_dict() for layer in model.layers.layers)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert not torch.equal(model.square, like.square)
        model.lstm(torch.ones(2, 1, 3))
    assert model.rates == like.rates and model.listed == like.listed and torch.equal(model.table, like.table)
    assert torch.equal(model.mask, like.mask) and torch.equal(model.alias, model.square[0])


def test_a_tensors_values_are_those_of_its_name_alone() -> None:
    """Another layer in front changes nothing for those that keep their names."""

    def longer() -> nn.Module:
        model = nn.Module()
        model.twin = nn.Linear(40, 30)
        model.last = nn.Linear(40, 30)
        return model

    def shorter() -> nn.Module:
        model = nn.Module()
        model.last = nn.Linear(40, 30)
        return model

    one, other = (detached(build_full_model(build, seed=SEED, limit_bytes=NEAR)) for build in (longer, shorter))
    assert torch.equal(one["last.weight"], other["last.weight"])
    assert not torch.equal(one["last.weight"], one["twin.weight"])
    third = detached(build_full_model(shorter, seed=SEED + 1, limit_bytes=NEAR))
    assert not torch.equal(third["last.weight"], other["last.weight"])


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.first.weight.data.resize_(4, 5)


def test_what_cannot_be_recorded_is_built_whole_or_refused_by_name() -> None:
    with pytest.raises(Unrecordable, match=r"resize_.*test_initial_weights.py:\d+"):
        record_model(Stubborn, seed=SEED)
    made = defer_init(Stubborn, seed=SEED, world=World.alone(), limit_bytes=FAR)
    assert made.model.first.weight.is_meta and "resize_" in made.notes[0]
    fill_model(made.model, made.values({})[0])
    assert made.model.first.weight.shape == (4, 4)
    with pytest.raises(UsageError, match="resize_") as caught:
        defer_init(Stubborn, seed=SEED, world=World.alone(), limit_bytes=8)
    assert f"--init.limit {tensor_bytes(Stubborn())}" in str(caught.value)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.noise = torch.randn(3)


def test_a_random_tensor_that_is_no_buffer_is_that_of_the_plain_build() -> None:
    def build() -> nn.Module:
        seed_all(3)
        return Loose()

    made = defer_init(build, seed=SEED, world=World.alone(), limit_bytes=FAR)
    assert torch.equal(made.model.noise, build().noise)
    with pytest.raises(UsageError, match="noise is neither parameter nor buffer"):
        defer_init(build, seed=SEED, world=World.alone(), limit_bytes=8)


class Marked(nn.Parameter):
    """A class of the user's own."""


def test_classes_and_attributes_of_tensors_stay() -> None:
    def build() -> nn.Module:
        model = nn.Linear(30, 30)
        model.weight = Marked(torch.randn(30, 30))
        model.weight.decays = False
        return model

    for limit in (NEAR, FAR):
        model, *_ = build_parts(build, seed=SEED, world=World.alone(), wanted=lambda _: {}, limit_bytes=limit)
        assert type(model.weight) is Marked and model.weight.decays is False and model.weight.requires_grad
