"""A checkpoint is saved before the evaluation at the same step, and only with usable weights."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.checkpoint.files.checkpoint_folder import check_checkpoint, open_checkpoint
from paceline.comm.process_group import World
from paceline.errors import JobError, NonFiniteError
from paceline.torch_internals.scalars import as_integer, as_number
from paceline.trainer.evaluation.on_eval_results import SharedMetrics, split_numbers_and_text
from tests.trainer.test_edge_cases_of_a_run import job, rows, trained

FAILING: dict[str, dict[str, Any]] = {
    "metric": {"metrics": {"f1": lambda output, batch: (1 / 0, 1)}},
    "on_eval": {"on_eval": lambda run: 1 / 0},
    "a word that is no dict": {"on_eval": lambda run: 3},
}


@pytest.mark.parametrize("name", FAILING)
def test_an_evaluation_that_fails_costs_no_step_and_is_made_up_for(tmp_path: Path, name: str) -> None:
    good = job(on_eval=lambda run: {"bleu": 1.0})
    whole = trained(good, tmp_path / "whole", checkpoint_every=2, eval_every=2)
    with pytest.raises((ZeroDivisionError, JobError), match=r"division by zero|on_eval= returned a int"):
        trained(replace(good, **FAILING[name]), tmp_path / "cut", checkpoint_every=2, eval_every=2)
    assert [path.name for path in sorted((tmp_path / "cut" / "checkpoints").glob("step-*"))] == ["step-00000002"]
    assert open_checkpoint(tmp_path / "cut" / "checkpoints" / "step-00000002").state["extra"]["unjudged"] is True

    assert trained(good, tmp_path / "cut", checkpoint_every=2, eval_every=2).exit_code == whole.exit_code == 0
    evaluated = [[row["step"] for row in rows(tmp_path / run) if "eval/loss" in row] for run in ("cut", "whole")]
    assert evaluated[0] == evaluated[1] == [2, 4, 6]
    digests = [json.loads((tmp_path / run / "weights.json").read_text())["digest"] for run in ("cut", "whole")]
    assert digests[0] == digests[1]


def test_what_an_evaluation_found_is_written_into_the_checkpoint_that_was_saved_before_it(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, 2.0])
    made = job(best="score:max", on_eval=lambda run: {"score": next(values)})
    trained(made, tmp_path, checkpoint_every=2, eval_every=2)
    extras = {path.name[-1]: open_checkpoint(path).state["extra"] for path in (tmp_path / "checkpoints").glob("step-*")}
    assert {step: (extra["best"], extra["unjudged"]) for step, extra in extras.items()} == {
        "2": (1.0, False),
        "4": (3.0, False),
        "6": (3.0, False),
    }
    assert (tmp_path / "checkpoints" / "best").read_text().split()[0] == "step-00000004"
    for path in (tmp_path / "checkpoints").glob("step-*"):
        check_checkpoint(path)


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor([0.5]), Fraction(1, 2)]
)
def test_a_number_of_any_type_is_best_and_ends_a_run(tmp_path: Path, number: Any) -> None:
    rule = pl.EarlyStopping(metric="bleu", mode="max", patience=2)
    made = job(on_eval=lambda run: {"bleu": number, "text": "words"}, best="bleu:max", early_stopping=rule)
    trained(made, tmp_path, train_steps=9, eval_every=1, checkpoint_every=9)
    assert (tmp_path / "checkpoints" / "best").read_text().split()[0] == "step-00000001"
    assert max(row["step"] for row in rows(tmp_path)) == 3


class Ranks(World):
    """Ranks that say these things."""

    def __init__(self, *others: Any) -> None:
        super().__init__(device=torch.device("cpu"))
        object.__setattr__(self, "others", others)

    def gather_json(self, value: Any) -> list[Any]:
        return json.loads(json.dumps([value, *self.others]))  # type: ignore[attr-defined,no-any-return]


def test_a_number_that_one_rank_has_is_everybody_s_and_one_that_differs_is_told_once() -> None:
    shared = SharedMetrics(Ranks({"loss": 1.0, "bleu": 0.4, "own": 2.0, "broken": math.nan}))
    for told in (True, False):
        assert shared.share({"loss": 1.0, "bleu": 0.1}) | {"broken": 0} == {
            "loss": 1.0,
            "bleu": 0.1,
            "own": 2.0,
            "broken": 0,
        }
        assert shared.note.startswith("bleu is 0.1 on rank 0 and 0.4 on rank 1: rank 0's value is used") is told
    quiet = SharedMetrics(Ranks({}))
    assert quiet.share({"bleu": math.nan}).keys() == {"bleu"} and not quiet.note


def test_numbers_and_what_is_none() -> None:
    values = {"a": np.int64(3), "b": True, "c": torch.ones(2), "d": "x", "e": None, "f": np.bool_(True), "g": 1j}
    numbers, text = split_numbers_and_text(values)
    assert numbers == {"a": 3.0, "b": 1.0, "f": 1.0} and set(text) == {"c", "d", "e", "g"}
    assert as_number(np.longdouble(0.5)) == 0.5 and as_integer(np.int32(4)) == 4 and as_integer(True) is None
    assert as_integer(2.5) is None and as_number(np.ones(2)) is None and split_numbers_and_text(None) == ({}, {})


class Overflow(torch.optim.SGD):
    """Its update is not finite in step 5, of gradients that are."""

    taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.taken += 1
        if self.taken == 5:
            self.param_groups[0]["params"][-1].mul_(math.inf)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    made = job(optimizer=lambda named: Overflow([p for _, p in named], lr=0.1), eval_data=None)
    with pytest.raises(NonFiniteError, match=r"after step 5 weights are not finite: 2.bias"):
        trained(made, tmp_path, train_steps=5, checkpoint_every=4)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000004"]
    assert not (tmp_path / "consolidated").exists()
