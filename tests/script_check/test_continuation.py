"""Two loops of one process are compared: one that continues the other, one with fewer passes, one with two losses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.script_check.comparison.script_comparison import ScriptComparison, compare_scripts

SIZE = 8


class TwoHeads(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.one, self.other = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.one(hidden), self.other(hidden)


def batches(count: int) -> list[Tensor]:
    return list(torch.randn(count, SIZE, 4, generator=torch.Generator().manual_seed(1)))


def train(
    out: Path, steps: Sequence[Sequence[Tensor]], *, divisor: int = 1, two: bool = False, state: Any = None
) -> dict[str, Any]:
    """Train with the passes of each step, and record it; return the state after step 3."""
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if state is not None:
        model.load_state_dict(state["model"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
    saved: dict[str, Any] = {}
    with pl.check(steps=0, out=out):
        for number, passes in enumerate(steps):
            optimizer.zero_grad()
            for x in passes:
                one, other = model(x)
                chosen = x[:, :2] > 0
                loss = one.square().mean()
                if two:
                    loss = (one.square() * chosen).sum() / chosen.sum()
                    loss = loss + (other.square() * ~chosen).sum() / (~chosen).sum()
                (loss / divisor).backward()
            optimizer.step()
            if number == 2:
                saved = {
                    "model": {name: p.clone() for name, p in model.state_dict().items()},
                    "optimizer": torch.load(_copy(optimizer, out)),
                }
    return saved


def _copy(optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder / "optimizer.pt"


def compared(folder: Path, one: str, other: str) -> ScriptComparison:
    return compare_scripts(folder / one, folder / other)


def test_a_run_that_continues_another_one_is_compared_with_its_later_steps(tmp_path: Path) -> None:
    data = [[x] for x in batches(6)]
    state = train(tmp_path / "before", data)
    train(tmp_path / "continued", data[3:], state=state)
    train(tmp_path / "anew", data[:3], state=state)
    train(tmp_path / "stateless", data[3:], state={"model": state["model"]})
    same = compared(tmp_path, "before", "continued")
    assert (same.verdict, same.cause) == ("same", "bitwise, 3 steps"), same.text
    assert "continued continues before after its step 3" in same.notes[0]
    anew = compared(tmp_path, "anew", "before")
    assert anew.exit_code == 4 and "anew reads the samples of steps 1 to 3 of before again" in anew.cause, anew.text
    stateless = compared(tmp_path, "before", "stateless")
    assert stateless.exit_code == 4 and "the optimizer began without its state" in stateless.cause, stateless.text


def test_a_step_with_fewer_passes_is_named(tmp_path: Path) -> None:
    whole = batches(4)
    halves = [list(x.chunk(2)) for x in whole]
    halves[3], whole[3] = halves[3][:1], whole[3][: SIZE // 2]
    train(tmp_path / "one", [[x] for x in whole])
    train(tmp_path / "many", halves, divisor=2)
    comparison = compared(tmp_path, "one", "many")
    assert comparison.step == 4 and "this step of many has 1 backward pass, and most have 2" in comparison.cause
    assert "0.5 times those of one" in comparison.cause, comparison.text


def test_two_losses_with_means_of_their_own_are_named(tmp_path: Path) -> None:
    whole = batches(3)
    train(tmp_path / "one", [[x] for x in whole], two=True)
    train(tmp_path / "many", [list(x.chunk(2)) for x in whole], divisor=2, two=True)
    comparison = compared(tmp_path, "one", "many")
    assert "the backward passes of many count as" in comparison.cause, comparison.text
    assert "a mean of means, for several losses" in comparison.cause and "for one." in comparison.cause


@pytest.mark.parametrize(
    ("seeds", "hint"), [((5, 9), "the same seed"), ((5, 5), "start both from the same checkpoint")]
)
def test_the_hint_for_other_start_weights_knows_the_seeds(tmp_path: Path, seeds: tuple[int, int], hint: str) -> None:
    for name, seed in zip(("one", "many"), seeds, strict=True):
        model = TwoHeads(seed + (name == "one"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(seed)
        with pl.check(out=tmp_path / name):
            model(batches(1)[0])[0].sum().backward()
            optimizer.step()
    assert compared(tmp_path, "one", "many").hint.startswith(hint)
