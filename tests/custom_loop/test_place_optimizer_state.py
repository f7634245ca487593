"""Every kind of optimizer state survives save and load of `pl.place` with its type, or is refused by name."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.checkpoint.state_json import decode_state, encode_state
from paceline.errors import CheckpointError
from tests.trainer.test_edge_cases_of_a_run import job, trained

Change = Callable[[dict[Any, Any], nn.Parameter], object]


class Thing:
    """An object of the user's own."""


class Keeping(torch.optim.SGD):
    """SGD that keeps more in its state."""

    def __init__(self, params: Any, change: Change, shared: dict[Any, Any] | None = None) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.change = change
        self.state.update(shared or {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.change(self.state[p], p)


SAVED: dict[str, Change] = {
    "text": lambda s, p: s.update(mode="warm"),
    "numbers": lambda s, p: s.update(a=0.1, b=None, c=True, d=1j, e=float("inf"), f=np.float32(3), g=np.arange(4)),
    "a nested dict": lambda s, p: s.update(inner={"a": torch.ones(3), "b": {"c": p.detach() * 2}}),
    "a list of large tensors": lambda s, p: s.update(history=[p.detach() * 2, torch.arange(5000.0)]),
    "another shape": lambda s, p: s.update(table=torch.arange(5000.0)),
    "one number": lambda s, p: s.update(d=torch.tensor(0.5), step=torch.tensor(5.0)),
    "complex": lambda s, p: s.update(phase=p.detach() * 1j),
    "a number as key": lambda s, p: s.update({3: p.detach() * 3}),
    "a slash in a key": lambda s, p: s.update({"a/b": p.detach() * 3}),
    "a tuple as key": lambda s, p: s.update({("a", 1): p.detach() * 3}),
    "a plus before a key": lambda s, p: s.update({"+0": p.detach() * 3, "list": [p.detach() * 4]}),
    "several": lambda s, p: s.update(x={2, 1}, y=frozenset({3}), z=deque([1, 2], maxlen=2), t=(1, [2])),
    "bits and empty ones": lambda s, p: s.update(mask=p.detach() > 0, none=torch.empty(0, 4)),
    "another order in memory": lambda s, p: s.update(x=torch.arange(12.0).reshape(3, 4).t()),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "an object": (lambda s, p: s.update(thing=Thing()), "the state 'thing' of Keeping for weight .* contains a Thing"),
    "an object within": (lambda s, p: s.update(x={"y": [Thing()]}), "the state 'x' of Keeping .* contains a Thing"),
    "a function": (lambda s, p: s.update(f=lambda: 1), "the state 'f' of Keeping for weight .* contains a function"),
    "a generator": (lambda s, p: s.update(g=torch.Generator()), "the state 'g' of Keeping .* contains a Generator"),
    "sparse": (
        lambda s, p: s.update(sp=p.detach().to_sparse()),
        "the state 'sp' of Keeping .* contains a sparse tensor",
    ),
    "sparse within": (
        lambda s, p: s.update(x=[torch.eye(3).to_sparse()]),
        "the state 'x' of .* contains a sparse tensor",
    ),
}


def placed(change: Change, shared: dict[Any, Any] | None = None) -> tuple[Any, torch.optim.Optimizer]:
    found = pl.place(lambda: nn.Linear(3, 2))
    return found, found.optimizer(lambda named: Keeping([p for _, p in named], change, shared))


def told(value: Any) -> Any:
    """Type, bits and place of everything in it."""
    if isinstance(value, Tensor):
        return "tensor", value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [told(item) for item in value], getattr(value, "maxlen", None)
    return type(value), str(value)


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    named = [told(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]
    return [*named, told({key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)})]


def saved_and_loaded(folder: Path, change: Change, shared: dict[Any, Any] | None = None) -> tuple[list[Any], list[Any]]:
    one, optimizer = placed(change, shared)
    one.backward(one.model(torch.ones(4, 3)).sum())
    optimizer.step()
    one.save(folder / "saved")
    two, other = placed(change)
    two.load(folder / "saved")
    return states(optimizer), states(other)


@pytest.mark.parametrize("name", SAVED)
def test_state_comes_back_with_its_type_and_values(tmp_path: Path, name: str) -> None:
    before, after = saved_and_loaded(tmp_path, SAVED[name])
    assert before == after and len(before) == 3


def test_what_belongs_to_no_parameter_comes_back_too(tmp_path: Path) -> None:
    shared = {"all": {"step": 3, "sum": torch.ones(3)}, ("table", 3): [torch.zeros(2, 2)]}
    before, after = saved_and_loaded(tmp_path, lambda s, p: None, shared)
    assert before == after and len(before[-1]) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_can_not_be_written_is_refused_by_name_at_the_first_save(tmp_path: Path, name: str) -> None:
    change, words = REFUSED[name]
    one, optimizer = placed(change)
    one.backward(one.model(torch.ones(4, 3)).sum())
    optimizer.step()
    with pytest.raises(CheckpointError, match=words):
        one.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("name", ["an object", "sparse"])
def test_a_run_refuses_it_after_its_first_step(tmp_path: Path, name: str) -> None:
    change, words = REFUSED[name]
    made = job(optimizer=lambda named: Keeping([p for _, p in named], change), model=lambda: nn.Linear(4, 2))
    with pytest.raises(CheckpointError, match=words):
        trained(made, tmp_path)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_what_earlier_versions_wrote_as_a_tuple_is_read_as_one() -> None:
    assert decode_state({"__paceline__": "tuple", "value": [1, 2]}) == (1, 2)
    assert decode_state(encode_state({3, 1, 2}, where="")) == {1, 2, 3}
