"""A loss term without a target, in the reference, in verify and in a run's messages."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paceline as pl
from paceline.errors import NonFiniteError
from paceline.verification.reference.reference import Reference, ReferenceConfig, ReferenceGradient, RunPosition
from tests.trainer.checks.test_assumptions_about_a_job import rare
from tests.trainer.test_edge_cases_of_a_run import trained
from tests.verification.test_detection_thresholds import verify

SECOND = RunPosition(steps_done=1, epoch=0, batch_start=8)  # whose samples have no target of b


def only_b(output: Any, batch: Any) -> Any:
    return F.cross_entropy(output[1], batch[2], reduction="sum"), (batch[2] != -100).sum()


def gradient(job: pl.Job, on_empty: str) -> tuple[Reference, ReferenceGradient]:
    spec = ReferenceConfig(seed=0, global_batch_size=8, micro_batch_size=4, on_empty=on_empty)
    reference = Reference(job=job, config=spec, cast=lambda x: x)
    return reference, reference.compute_gradient(SECOND)


def test_the_oracle_takes_the_other_terms_alone() -> None:
    reference, found = gradient(rare(), "zero")
    x, a, _ = rare().train_data[8:16]
    loss = F.cross_entropy(reference.model(x)[0], a)
    names = [name for name, _ in reference.model.named_parameters() if not name.startswith("b.")]
    right = torch.autograd.grad(loss, [reference.model.get_parameter(name) for name in names])
    for name, value in zip(names, right, strict=True):  # two microbatches are added up for one
        torch.testing.assert_close(found.total[name], value, rtol=0, atol=1e-7)
    assert [float(found.total[name].abs().max()) for name in ("b.weight", "b.bias")] == [0.0, 0.0]
    assert found.empty_terms == [] and math.isclose(found.loss, float(loss.detach()), rel_tol=1e-6)


def test_the_oracle_stops_where_the_job_says_nothing_and_where_the_sum_is_something() -> None:
    def loss(output: Any, batch: Any) -> Any:
        terms = rare().loss(output, batch)  # type: ignore[misc]
        return {**terms, "b": (terms["b"][0] + 1.0, terms["b"][1])}

    for job, on_empty in ((rare(), "stop"), (rare(loss=loss), "zero")):
        found = gradient(job, on_empty)[1]
        assert found.empty_terms == ["b"] and math.isnan(found.loss)


def test_the_only_term_gives_a_step_of_nothing() -> None:
    found = gradient(rare(loss=only_b, count=None), "zero")[1]
    assert found.loss == 0.0 and found.empty_terms == []
    assert all(torch.equal(value, torch.zeros_like(value)) for value in found.total.values())


@pytest.mark.parametrize("fields", [{}, {"loss": only_b, "count": None}], ids=["two terms", "one term"])
def test_verify_finds_the_same_training(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    answer = verify(rare(**fields), None, monkeypatch, **{"train.on_empty": "zero", "train.micro_batch_size": 4})
    assert answer["verdict"] in ("bitwise", "rounding"), answer["lines"]
    assert "has no target" not in "\n".join(answer["lines"])


def coded_as_nan() -> pl.Job:
    """The second target is a number, and NaN where there is none."""
    x, a, b = rare().train_data.tensors
    values = torch.where(b == -100, math.nan, b.float())

    def loss(output: Any, batch: Any) -> Any:
        is_there = ~batch[2].isnan()
        apart: Tensor = output[1][is_there, 0] - batch[2][is_there]
        return {
            "a": (F.cross_entropy(output[0], batch[1], reduction="sum"), len(batch[1])),
            "b": (apart.square().sum(), is_there.sum()),
        }

    data = torch.utils.data.TensorDataset(x, a, values)
    made = rare(loss=loss, count=lambda batch: {"a": len(batch[1]), "b": (~batch[2].isnan()).sum()})
    return replace(made, train_data=data)


def test_targets_coded_as_nan_are_not_the_cause_of_a_term_without_any(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="step 2: the count of b is 0") as refused:
        trained(coded_as_nan(), tmp_path / "stop", train_steps=3)
    assert "--train.on_empty zero" in refused.value.hint and "inputs" not in refused.value.cause
    trained(coded_as_nan(), tmp_path / "zero", train_steps=3, train_on_empty="zero")
