"""`pl.place`: in every layout a user's script ends with the weights of plain torch in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import JobError, LayoutError, UsageError
from tests.custom_loop.place_ranks import Net, adam
from tests.forked_ranks import run_forked
from tests.matrix.matrix_page import patterns, stands

TOLERANCE = 2e-6  # of weights near 1 after four steps of AdamW; what differs in kind differs by 1e-3


def started(folder: Path, *, ranks: int, cases: list[str], mode: str = "ours") -> dict[str, Any]:
    """What rank 0 of real processes finds, by case."""
    words = [str(folder), mode, *cases]
    told, *_ = run_forked("tests.custom_loop.place_ranks", words, ranks=ranks, folder=folder, environ={}, timeout=500)
    return dict(json.loads(line) for line in told.splitlines() if line.startswith("["))


def check(found: dict[str, Any], cases: list[str]) -> None:
    assert list(found) == cases
    for case in cases:
        assert found[case]["apart"] <= TOLERANCE, case
        assert found[case].get("norm", 0.0) <= TOLERANCE, case


def check_words(found: dict[str, Any], cases: list[str]) -> None:
    words = {f"{case}, {name}": what for case in cases for name, what in found.pop(case).items()}
    assert not [name for name, what in words.items() if stands(what, patterns()) is None], words


DAILY = ["plain:ddp", "counted:zero1", "plain:zero2", "counted:fsdp", "gan:fsdp", "gan:tp=2", "handed:fsdp"]
DAILY += ["files:fsdp", "numbers:ddp", "numbers:zero1", "dropped:fsdp", "frozen:fsdp", "changed:fsdp"]
MORE = [
    "counted:ddp",
    "plain:zero1",
    "counted:zero2",
    "plain:fsdp",
    "gan:ddp",
    "files:ddp",
    "numbers:fsdp",
    "dropped:zero1",
]


def test_weights_are_those_of_one_process(tmp_path: Path) -> None:
    found = started(tmp_path, ranks=2, cases=[*DAILY, "told:ddp"])
    check_words(found, ["told:ddp"])
    check(found, DAILY)
    assert found["handed:fsdp"]["drafted"] == 1


@pytest.mark.soak
def test_weights_in_more_layouts_are_those_of_one_process(tmp_path: Path) -> None:
    found = started(tmp_path, ranks=2, cases=[*MORE, "told:fsdp"])
    check_words(found, ["told:fsdp"])
    check(found, MORE)


@pytest.mark.soak
def test_gradients_between_backward_and_step(tmp_path: Path) -> None:
    cases = [f"dropped:{layout}" for layout in ("ddp", "zero1", "zero2", "fsdp")]
    cases += ["frozen:ddp", "frozen:zero2", "frozen:fsdp", "changed:ddp", "changed:zero1", "changed:fsdp"]
    tells = ["told:ddp", "told:zero1", "told:fsdp"]
    found = started(tmp_path, ranks=2, cases=[*cases, *tells])
    check_words(found, tells)
    check(found, cases)


def test_one_process_alone_gives_the_bits_of_plain_torch(tmp_path: Path) -> None:
    found = started(tmp_path, ranks=1, cases=["plain:single", "gan:single"])
    assert found["plain:single"] == {"apart": 0.0, "norm": 0.0} and found["gan:single"] == {"apart": 0.0}


@pytest.mark.soak
def test_torch_s_own_wrappers_give_what_one_process_gives(tmp_path: Path) -> None:
    """The reference of these tests is checked too: plain FSDP, tensor parallelism and DDP on the same script."""
    found = started(tmp_path, ranks=1, cases=["large:single"])
    others = started(tmp_path, ranks=2, cases=["large:fsdp", "large:tp", "plain:fsdp"], mode="theirs")
    ddp = started(tmp_path, ranks=2, cases=["large:ddp"], mode="theirs")
    check({"plain:fsdp": others["plain:fsdp"]}, ["plain:fsdp"])
    assert ddp["group"] == "gone", "its threads would outlive the interpreter"  # fully_shard itself keeps it
    assert ddp["large:ddp"] == others["large:fsdp"] == others["large:tp"] == found["large:single"]


@pytest.mark.soak
def test_on_meshes_of_four(tmp_path: Path) -> None:
    layouts = ("hsdp", "fsdp,tp=2", "dp=2,tp=2", "zero1,tp=2", "zero1", "zero2", "fsdp")
    cases = [f"{case}:{layout}" for layout in layouts for case in ("plain", "counted", "gan", "files")]
    cases += [f"numbers:{layout}" for layout in ("hsdp", "zero1", "zero2", "fsdp", "ddp")]
    check(started(tmp_path, ranks=4, cases=cases), cases)


def test_what_it_refuses() -> None:
    alone = pl.World.alone()
    with pytest.raises(LayoutError, match=r"pl.place has no pp") as refused:
        pl.place(Net, layout="pp=2", world=alone)
    assert "pl.Run(job, layout='pp=2')" in refused.value.hint
    with pytest.raises(LayoutError, match="has no cp"):
        pl.place(Net, layout="cp=2", world=alone)
    with pytest.raises(LayoutError, match="needs 2 ranks, you have 1"):
        pl.place(Net, layout="dp_shard=2", world=alone)
    with pytest.raises(UsageError, match="does not use the setting"):
        pl.place(Net, world=alone, settings={"train.exact": True})
    with pytest.raises(UsageError, match=r"there is no setting 'place.unit'"):
        pl.place(Net, world=alone, settings={"place.unit": "Block"})


def test_a_step_needs_a_backward_of_its_own() -> None:
    placed = pl.place(Net, world=pl.World.alone())
    optimizer = placed.optimizer(adam)
    placed.model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(UsageError, match="was not called yet"):
        optimizer.step()
    placed.backward(placed.model(torch.ones(2, 6)).sum(), count=2)
    with pytest.raises(UsageError, match="have count= and others do not"):
        placed.backward(placed.model(torch.ones(2, 6)).sum())
    with pytest.raises(JobError, match="has an optimizer already"):
        placed.optimizer(adam)


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "fsdp"])
def test_a_later_step_needs_a_backward_of_its_own_too(layout: str) -> None:
    placed = pl.place(Net, layout=layout, world=pl.World.alone())
    optimizers = [placed.optimizer(lambda named: adam(named[:1])), placed.optimizer(lambda named: adam(named[1:]))]
    for _ in range(2):  # two optimizers may step after one backward
        placed.backward(placed.model(torch.ones(2, 6)).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    placed.model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(UsageError, match="was not called since this optimizer's last step"):
        optimizers[1].step()


def test_alone_gradients_are_at_hand() -> None:
    placed = pl.place(Net, world=pl.World.alone())
    optimizer = placed.optimizer(adam)
    x = torch.ones(2, 6)
    placed.backward(placed.model(x).sum())
    assert nn.utils.clip_grad_norm_(placed.model.parameters(), 1.0) > 1
    optimizer.step()
    placed.backward(placed.model(x).sum(), count=3)
    with pytest.raises(UsageError, match="is not reduced yet"):
        nn.utils.clip_grad_norm_(placed.model.parameters(), 1.0)
    optimizer.zero_grad()
    placed.backward(placed.model(x).sum(), count=2)
    right = torch.autograd.grad(placed.model(x).sum() / 2, placed.model.enter.weight)[0]
    torch.testing.assert_close(placed.gradients()["enter.weight"], right)


def test_what_is_frozen() -> None:
    def half() -> nn.Module:
        model = Net()
        model.enter.requires_grad_(False)
        return model

    placed = pl.place(half, world=pl.World.alone())
    placed.model.enter.requires_grad_(True)
    with pytest.raises(UsageError, match=r"enter.weight was frozen when the model was placed") as refused:
        placed.backward(placed.model(torch.ones(2, 6)).sum())
    assert stands(refused.value.what, patterns())
    placed.model.requires_grad_(False)
    with pytest.raises(UsageError, match="every parameter is frozen"):
        placed.backward(torch.zeros((), requires_grad=True) * 1)


def test_it_can_be_called_whatever_was_imported_before() -> None:
    """A package of the same name lies below; importing anything in it makes it the attribute."""
    assert callable(pl.place) and callable(pl.train)
    assert isinstance(pl.place(lambda: nn.Linear(2, 2), world=pl.World.alone()).model, nn.Linear)
