"""The cause that `compare` names for a small difference: what the recordings show, not a factor of 1."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl

STEPS, WRONG_FROM = 10, 6
WEIGHT = "2.weight"
Spoil = Callable[[Tensor], None]


def train(path: Path, *, spoil: Spoil = lambda gradient: None, **settings: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.01, **settings})
    with pl.record(model, optimizer, path):
        for step in range(1, STEPS + 1):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            gradient = model.get_parameter(WEIGHT).grad
            assert gradient is not None
            if step == WRONG_FROM:
                spoil(gradient)
            optimizer.step()
    return path


@pytest.mark.parametrize("settings", [{"weight_decay": 0.02}, {"weight_decay": 0.0}, {"betas": (0.91, 0.999)}])
def test_other_settings_of_the_optimizer_are_no_factor(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Each step's weights differ by less than the limit; the gradients exceed it some steps later."""
    found = pl.compare(train(tmp_path / "a"), train(tmp_path / "b", **settings))
    assert found.first_difference is not None and found.first_difference["step"] > 1
    assert "factor" not in found.text
    step = 2 if "betas" in settings else 1  # Adam's first step is the same for all betas
    assert f"Already after step {step} the weights differed" in found.text
    assert "the optimizer's settings, such as weight decay" in found.text


def one_element(gradient: Tensor) -> None:
    gradient[3, 3] *= 1.05


def one_element_far(gradient: Tensor) -> None:
    gradient[3, 3] = 1.0


def some_elements(gradient: Tensor) -> None:
    gradient[3] *= 1.0 + 0.003 * torch.randn(32, generator=torch.Generator().manual_seed(1))


def scale(factor: float) -> Spoil:
    def spoil(gradient: Tensor) -> None:
        gradient *= factor

    return spoil


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (one_element, "one element differs, by "),
        (one_element_far, "one element differs, by "),
        (some_elements, "of their norm, in a few elements"),
        (scale(1 / 1.0005), "a factor of 1.0005: a slightly different scale"),
        (scale(0.5), "a factor of 2 (1 of 6 parameters): a sum instead of a mean"),
        (scale(-1.0), "a factor of -1 (1 of 6 parameters): a wrong sign"),
        (scale(0.0), "zero in one run only"),
    ],
)
def test_a_small_difference_is_named_by_what_is_seen(tmp_path: Path, spoil: Spoil, cause: str) -> None:
    found = pl.compare(train(tmp_path / "a"), train(tmp_path / "b", spoil=spoil))
    assert found.first_difference is not None
    assert (found.first_difference["step"], found.first_difference["parameter"]) == (WRONG_FROM, WEIGHT)
    assert cause in found.text, found.text
