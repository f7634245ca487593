"""A job's fields and the parameters of `make_job` are read in their types, or refused by name with a line to write."""

import copy
import functools
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.commands.common.option_checks import check_job_parameters
from paceline.config.job_reference import parameter_sources, parse_jobref
from paceline.config.merge_settings import RequestedSettings
from paceline.data.source import read_source
from paceline.errors import JobError, PacelineError, Problems, job_exit_error
from paceline.job import load_job, refuse_job
from paceline.job_field_checks import _unfit_metrics, integer_indices, unfit_data
from paceline.job_parameters import typed_parameters
from paceline.launch.agent.worker_process import _run_entry
from paceline.trainer.checks.evaluation_checks import best_rule


class Kind(Enum):
    SMALL = "small"
    LARGE = "large"


def make_job(
    layers=[1, 2], pair=(0.5, 1), folder=Path("data"), kind=Kind.SMALL, table={"a": 1}, word="x", flag=False,  # noqa: B006
    nothing=None, rate=1e-3, count=3, free=[],  # noqa: B006
    sizes: list[int] | None = None, width: int | None = None, loss: Literal["sum", "mean"] = "sum", root: Path | str = "",
    triple: tuple[int, float, str] = (1, 2.0, "c"), half: float = 1, names: Sequence[str] = (), odds: Mapping[str, float] = {},
    either: int | float | str = 0, truth: bool | None = None, made: nn.Module | None = None, needed: int = 1,
) -> None:  # fmt: skip
    """Parameters of every type."""


RIGHT: list[tuple[str, Any, Any]] = [
    ("layers", "3,4", [3, 4]), ("layers", "[3, 4]", [3, 4]), ("layers", [3, 4], [3, 4]), ("layers", "", []),
    ("pair", "2,3", (2, 3)), ("pair", "(2, 'x')", (2, "x")), ("folder", "a/b", Path("a/b")), ("kind", "LARGE", Kind.LARGE),
    ("kind", "large", Kind.LARGE), ("table", "{'a': 2, 'b': 3}", {"a": 2, "b": 3}), ("word", "5", "5"), ("flag", "true", True),
    ("flag", "0", False), ("nothing", "data", "data"), ("rate", "5", 5.0), ("rate", 5, 5.0), ("count", "4", 4),
    ("free", "1,x", [1, "x"]), ("sizes", "1,2", [1, 2]), ("sizes", "none", None), ("width", "8", 8), ("width", "None", None),
    ("loss", "mean", "mean"), ("root", "a/b", Path("a/b")), ("triple", "1,2,3", (1, 2.0, "3")), ("half", "0.5", 0.5),
    ("names", "a, b", ["a", "b"]), ("odds", "{'x': 1}", {"x": 1.0}), ("either", "3", 3), ("either", "0.5", 0.5),
    ("either", "x", "x"), ("truth", "false", False), ("truth", "none", None),
]  # fmt: skip
WRONG: list[tuple[str, Any]] = [
    ("layers", "a,b"), ("layers", 3), ("kind", "HUGE"), ("table", "a=1"), ("word", 5), ("flag", "maybe"), ("flag", 1),
    ("nothing", "5"), ("nothing", "[1]"), ("rate", [1, 2]), ("rate", True), ("rate", "fast"), ("count", 2.5), ("count", "2.5"),
    ("sizes", "x"), ("width", "wide"), ("loss", "max"), ("triple", "1,2"), ("half", "x"), ("made", "Linear"), ("truth", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "expected"), RIGHT)
def test_a_parameter_has_its_type(name: str, given: Any, expected: Any) -> None:
    found = typed_parameters(make_job, {name: given})[name]
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("name", "given"), WRONG)
def test_what_a_parameter_can_t_be_is_refused_by_name(name: str, given: Any) -> None:
    with pytest.raises(JobError, match=rf"--job\.{name}="):
        typed_parameters(make_job, {name: given})


def test_all_that_is_wrong_with_parameters_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "several_job.py"
    path.write_text("def make_job(lr: float, width: int = 3, names=[1]): ...\n")
    with pytest.raises(Problems) as refused:
        load_job(parse_jobref(str(path)), params={"width": "wide", "foo": 3})
    assert [one.what for one in refused.value.problems] == [
        f"{path} has no parameter foo.", "make_job needs lr, which has no default.", "--job.width=wide is not a valid int."
    ]  # fmt: skip
    assert "--job.lr VALUE" in refused.value.problems[1].hint
    asked = RequestedSettings(values={"job.width": "wide", "job.foo": "3", "job.names": "a"})
    before_start = check_job_parameters(parameter_sources(parse_jobref(str(path))), asked)
    assert {one.what for one in before_start} == {
        "make_job has no parameter 'foo'.", "--job.width=wide is not a valid int.", "make_job needs lr, which has no default.",
        "--job.names=a is not a valid list[int].",
    }  # fmt: skip


def words_now(payload: Mapping[str, Any]) -> int:
    """An entry of a rank: its answer says whether it sees the words of a script without any."""
    return int(sys.argv == [payload["seen"]])


def test_a_rank_has_the_words_of_a_script_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["forkserver.py", "request.json"])
    entry = f"{__name__}:words_now"
    assert _run_entry(entry, {"job": "a/job.py:make", "seen": "a/job.py"}) == 1
    assert _run_entry(entry, {"job": "pkg.jobs:make", "seen": "pkg.jobs"}) == 1
    assert _run_entry(entry, {"seen": entry}) == 1
    assert sys.argv == ["forkserver.py", "request.json"]


@pytest.mark.parametrize(
    "place", ["p.parse_args()\ndef make_job(): return 3", "def make_job(): p.parse_args(); return 3"]
)
def test_a_job_with_a_parser_of_its_own_is_loaded_as_a_script_without_words(tmp_path: Path, place: str) -> None:
    path, words = tmp_path / "parser_job.py", list(sys.argv)
    begin = "import argparse, sys\nwords = sys.argv\np = argparse.ArgumentParser()\np.add_argument('--lr', default=1)\n"
    path.write_text(begin + place)
    with pytest.raises(JobError, match="returned a int, expected"):
        load_job(parse_jobref(str(path)), params={})
    assert sys.modules["parser_job"].words == [str(path)] and sys.argv == words
    path.write_text(begin + "p.add_argument('--data', required=True)\n" + place)
    with pytest.raises(SystemExit) as left:
        load_job(parse_jobref(str(path)), params={})
    refusal = job_exit_error(left.value)
    assert isinstance(refusal, JobError) and f"{path}:6" in refusal.what and "--job.lr 0.1" in refusal.hint
    path.write_text("import sys\nsys.exit(2)\njob = 3")
    with pytest.raises(SystemExit) as left:
        load_job(parse_jobref(str(path)), params={})
    assert "sys.exit(2)" in job_exit_error(left.value).what


def job(**fields: Any) -> pl.Job:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8))
    values: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "loss": lambda output, batch: (output.sum(), len(output)),
        "train_data": data,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "global_batch_size": 4,
    }
    return pl.Job(**{**values, **fields})


PARAMETER = nn.Parameter(torch.zeros(1))
SGD = torch.optim.SGD([PARAMETER], lr=0.1)
FIELDS: list[tuple[str, Any]] = [
    *((name, 3) for name in ("model", "optimizer", "loss", "lr_schedule", "forward", "count", "collate", "on_eval")),
    *((name, None) for name in ("model", "optimizer", "train_data", "global_batch_size")),
    *((name, 3) for name in ("metrics", "settings", "sequence", "order", "best")), ("metrics", {"a": 3}), ("settings", {3: 4}),
    ("model", nn.Linear(4, 2)), ("model", nn.Sequential()), ("optimizer", SGD), ("loss", nn.MSELoss),
    ("lr_schedule", torch.optim.lr_scheduler.StepLR(SGD, 3)), ("ema", "x"), ("ema", 1.0), ("ema", True), ("max_grad_norm", "x"), ("micro_batch_size", 2.5), ("global_batch_size", 2.5),
    ("global_batch_size", True), ("order", "random"), ("loss_over", "batches"), ("early_stopping", 0), ("early_stopping", "x"),
    ("early_stopping", pl.EarlyStopping(metric="loss", patience=0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=lambda value: str(value)[:20])
def test_a_field_that_is_something_else_is_named(name: str, value: Any) -> None:
    with pytest.raises(PacelineError) as refused:
        refuse_job(job(**{name: value}), where="job.py")
    assert name in str(refused.value) and f"{name}" in refused.value.hint + str(refused.value)
    assert "to do: " in str(refused.value) and refused.value.exit_code == 2


def test_all_that_a_job_lacks_is_said_at_once() -> None:
    with pytest.raises(Problems) as refused:
        refuse_job(pl.Job(model=nn.Linear(4, 2), loss_over="all"), where="job.py")  # type: ignore[arg-type]
    told = str(refused.value)
    assert len(refused.value.problems) == 5
    assert all(f"the job has no {name}=" in told for name in ("train_data", "optimizer", "global_batch_size"))
    with pytest.raises(Problems) as refused:
        pl.Job(model=nn.Linear, batch_size=3, metric={})  # type: ignore[call-arg]
    what = [one.what for one in refused.value.problems]
    assert what[:2] == ["a job has no field 'batch_size'.", "a job has no field 'metric'."] and len(what) == 5
    assert "global_batch_size" in refused.value.problems[0].cause and "metrics" in refused.value.problems[1].cause
    with pytest.raises(PacelineError, match="without its name"):
        job_of(nn.Linear)
    copied = copy.copy(job(ema=0.5))
    assert (
        copied.ema == 0.5 and replace(copied, ema=0.25).ema == 0.25 and pickle.loads(pickle.dumps(pl.Job())) == pl.Job()
    )


def job_of(*words: Any) -> pl.Job:
    return pl.Job(*words, train_data=[1], optimizer=torch.optim.SGD, global_batch_size=1)


X, Y = torch.zeros(8, 4), torch.zeros(8)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, Y), "TensorDataset(x, y)"), ([X, Y], "TensorDataset(x, y)"), ((X, X.long()), "TensorDataset(x, y)"),
        ((X.numpy(), Y.numpy()), "TensorDataset(torch.as_tensor(x), torch.as_tensor(y))"),
        ({"x": X, "y": Y}, "train_data=[{...} for each sample]"), ({"train": X, "test": Y}, "train_data=data['train']"),
        (list(X), ""), (tuple(X), ""), (X, ""), ([X, X], ""), ([(X[0], 1), (X[1], 2)], ""), ({0: X[0], 1: X[1]}, ""),
        ([X[0], Y[:4]], ""), ([X, Y[:3]], ""),
    ],
)  # fmt: skip
def test_columns_where_samples_should_be_are_named(data: Any, words: str) -> None:
    for name in ("train_data", "eval_data"):
        found = list(unfit_data(data, name=name))
        assert len(found) == bool(words)
        assert not words or name != "train_data" or words in found[0].hint
    if words:
        for given in (data, lambda: data):
            with pytest.raises(JobError, match="train_data is a "):
                read_source(given, collate=None, order=None, workers=0, name="train_data")
        assert read_source(data, collate=list, order=None, workers=0, name="train_data").data is data


def test_numbers_of_any_type_are_numbers() -> None:
    rule = pl.EarlyStopping(metric="loss", patience=np.int64(3), min_delta=torch.tensor(0.5))  # type: ignore[arg-type]
    made = job(
        global_batch_size=np.int64(8), micro_batch_size=torch.tensor(2), max_grad_norm=np.float32(0.5),
        ema=np.float64(0.9), early_stopping=rule,
    )  # fmt: skip
    refuse_job(made, where="")
    assert [type(getattr(made, name)) for name in ("global_batch_size", "micro_batch_size", "max_grad_norm", "ema")] == [
        int, int, float, float,
    ]  # fmt: skip
    assert (rule.patience, rule.min_delta) == (3, 0.5)


@pytest.mark.parametrize("order", [[0.5, 1.5], ["a"], [0, None], torch.tensor([0.5])])
def test_an_order_of_what_is_no_number_of_a_sample_is_refused(order: Any) -> None:
    with pytest.raises(JobError, match=r"order= returned .* at position"):
        integer_indices(list(order))


@pytest.mark.parametrize("order", [[2, 0], np.array([2, 0]), [torch.tensor(2), torch.tensor(0)], [np.int32(2), 0]])
def test_an_order_of_whole_numbers_of_any_type_is_taken(order: Any) -> None:
    assert integer_indices(list(order)).tolist() == [2, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("async def make_job(): pass", "async and returned a coroutine"),
        ("def make_job(): pass", "returned a NoneType"),
        ("job = 3", "is a int, expected a paceline.Job or a function"),
        ("make_job = 3", "is a int, expected a paceline.Job or a function"),
    ],
)
def test_a_file_whose_job_is_none_says_the_line_to_write(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "a_job.py"
    path.write_text(text)
    with pytest.raises(JobError) as refused:
        load_job(parse_jobref(str(path)), params={})
    assert words in str(refused.value) and "return pl.Job(" in refused.value.hint


def test_a_subclass_takes_words_of_its_own() -> None:
    class Wide(pl.Job):
        def __init__(self, width: int) -> None:
            super().__init__(
                model=lambda: torch.nn.Linear(width, 1),
                train_data=[1, 2],
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
                global_batch_size=2,
            )

    assert Wide(3).model().in_features == 3 and Wide(width=4).model().in_features == 4  # type: ignore[union-attr]


def test_a_metric_that_can_not_take_output_and_batch_is_refused_before_the_first_step() -> None:
    """What it returns is seen at the first evaluation; how it is called is known before."""
    bad: dict[str, tuple[Any, str]] = {
        "one": (
            lambda output: (output.sum(), 1),
            r"can't be called with the output and the batch: it is acc\(output\)",
        ),
        "three": (lambda output, batch, model: (1, 1), r"acc\(output, batch, model\)"),
        "named": (lambda output, *, batch: (1, 1), r"acc\(output, \*, batch\)"),
        "class": (torch.nn.L1Loss, "is the class L1Loss, not an object of it"),
    }
    for metric, said in bad.values():
        (problem,) = _unfit_metrics({"acc": metric})
        assert re.search(said, problem.what) and "metrics={" in problem.hint
    good: list[Any] = [
        lambda output, batch: (1, 1), lambda output, batch, k=3: (1, 1), lambda *both: (1, 1), max,
        functools.partial(lambda k, output, batch: (1, 1), 3), torch.nn.L1Loss(),
        type("Own", (), {"update": None, "compute": None})(),
    ]  # fmt: skip
    assert not list(_unfit_metrics({str(place): metric for place, metric in enumerate(good)}))


@pytest.mark.parametrize(
    "metric",
    [
        "accuracy",
        "val/acc",
        "Top1",
        "top_1",
        "f1_macro",
        "mIoU",
        "valAcc",
        "rouge1",
        "rougeL",
        "mAP",
        "val_map",
        "ndcg@10",
    ],
)
def test_a_metric_whose_name_says_that_higher_is_better_needs_its_mode(metric: str) -> None:
    lowest = f"would take the lowest {metric} for the best"
    with pytest.raises(JobError, match=lowest):
        pl.EarlyStopping(metric=metric)
    with pytest.raises(JobError, match=lowest):
        best_rule(SimpleNamespace(best=metric))  # type: ignore[arg-type]
    assert best_rule(SimpleNamespace(best=f"{metric}:max")) == (metric, "max")  # type: ignore[arg-type]
    assert pl.EarlyStopping(metric=metric, mode="max").mode == "max"
    assert pl.EarlyStopping(metric=metric, mode="min").mode == "min"


@pytest.mark.parametrize(
    "metric", ["loss", "perplexity", "error", "distance", "mapped", "accent", "dice_loss", "loss/dice", "top1_error"]
)
def test_any_other_metric_is_better_the_lower_it_is(metric: str) -> None:
    assert pl.EarlyStopping(metric=metric).mode == "min"
    assert best_rule(SimpleNamespace(best=metric)) == (metric, "min")  # type: ignore[arg-type]
