"""Trial forwards leave the model unchanged: attributes, buffers, parameters, generators."""

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.parallel.module_access.user_call_isolation import call_stateless, side_effect_free


class _Changing(nn.Module):
    """Changes all that a forward can change on its module."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.log: list[Any] = [[1], {"a": 2}]
        self.marks = {1}
        self.copied, self.swapped = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)
        self.hidden = [nn.BatchNorm1d(3)]
        self.sums, self.array = torch.zeros(2), np.zeros(2)
        self.draws, self.generator = random.Random(1), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.log[0].append(1)
        self.log[1]["b"] = self.log
        self.log.append(3)
        self.marks.add(2)
        with torch.no_grad():
            self.copied.data.copy_(x[0])
            self.swapped.data = x[0].clone()
            self.swapped.add_(1)
        self.sums += 1
        self.array += 1
        self.sums = self.sums + 1
        del self.array
        self.register_buffer("late", x[0])
        torch.rand(1, generator=self.generator)
        random.random(), np.random.rand(), torch.rand(1), self.draws.random()
        return self.hidden[0](self.norm(x)) * self.copied  # type: ignore[no-any-return]


def _all_of(model: _Changing) -> str:
    states = [random.getstate(), np.random.get_state(legacy=True)[1].tolist(), torch.get_rng_state().tolist()]
    own = [model.draws.getstate(), model.generator.get_state().tolist(), model.hidden[0].state_dict()]
    plain = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    return repr((states, own, plain, model.state_dict()))


def test_a_forward_that_only_looks_leaves_no_trace_in_the_model_or_the_generators():
    model = _Changing()
    array, batch = model.array, torch.randn(4, 3)
    before = _all_of(model)
    with side_effect_free(model):
        model.eval()
        model.train()(batch)
        assert model.count == 1
    assert _all_of(model) == before
    assert model.array is array
    model(batch)
    assert _all_of(model) != before


class _Centre:
    """A loss with a running state: numbers, a tensor, a list."""

    def __init__(self) -> None:
        self.count, self.centre, self.seen = 0, torch.zeros(3), [1]

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        self.centre += x.mean(0)
        self.centre = self.centre * 2
        self.seen.append(2)
        self.new = x
        return x.sum()

    def method(self, x: Tensor) -> Tensor:
        return self(x)


def test_a_loss_that_is_only_tried_keeps_its_own_state():
    batch, centre, count, kept = torch.randn(4, 3), _Centre(), 0, {"mean": 0.0, "deep": [[1]]}
    large = torch.zeros(1 << 17)

    def loss(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        kept["mean"] = x.mean()
        kept["deep"][0].append(2)  # type: ignore[index]
        return x.sum() + large.sum()

    for function in (centre, centre.method, loss, torch.relu, nn.Linear(3, 3)):
        with call_stateless(function):
            function(batch)  # type: ignore[operator]
    assert (count, kept) == (0, {"mean": 0.0, "deep": [[1]]})
    assert (centre.count, centre.centre.tolist(), centre.seen) == (0, [0.0] * 3, [1]) and not hasattr(centre, "new")


def test_what_a_loss_only_reads_is_not_written_to(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.ones(3, dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an array that can't be written to: writing is a crash
        table = torch.from_numpy(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    with call_stateless(lambda: table):
        assert float(table.sum()) == 3
