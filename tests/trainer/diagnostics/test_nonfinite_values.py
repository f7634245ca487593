"""A run names the sample, microbatch and rank of a value that is not finite."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.comm.process_group import World
from paceline.errors import NonFiniteError
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.step.step_totals import TotalsReduction
from paceline.trainer.diagnostics.nonfinite_inputs import describe_microbatches, explain_nonfinite_inputs
from tests.conftest import SMALL_JOB, Shop
from tests.trainer.test_edge_cases_of_a_run import job, trained

OPTION = "        max_grad_norm=1.0,\n"


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_sample_that_is_not_finite_is_named_by_whichever_rank_is_heard(shop: Shop, value: str) -> None:
    broken = f"    x[17, 2] = float('{value}')\n    y = torch.randint"
    shop.write("job.py", SMALL_JOB.replace("    y = torch.randint", broken))
    ended = shop.train("run", "--job.samples", "24", steps=3)
    assert ended.code == 1
    assert "the inputs of this step contain NaN or infinity: sample 17 of train_data" in ended.err, ended.text


@pytest.mark.parametrize(("sample", "micro", "rank"), [(17, 1, 0), (19, 2, 1)])
def test_the_microbatch_whose_loss_is_not_finite_is_named_with_its_rank(
    shop: Shop, sample: int, micro: int, rank: int
) -> None:
    """In order, twelve a step: whichever rank is heard first, the rank that had the sample is named."""
    broken = f"generator) % 4\n    x[{sample}, 2], y[{sample}] = float('nan'), 0\n"
    text = SMALL_JOB.replace("generator) % 4\n", broken).replace(OPTION, OPTION + "        order='sequential',\n")
    shop.write("job.py", text)
    ended = shop.train("run", "--job.samples", "24", steps=3)
    assert ended.code == 1 and "step 2: loss is nan" in ended.err, ended.text
    assert f"where: the loss of microbatch {micro} (rank {rank}), of 2 in this step" in ended.err, ended.text
    assert f"First error: rank {rank}, NonFiniteError" in ended.err, ended.text


def blamed(gather: Callable[[Any], Any], **about: bool) -> tuple[str, tuple[int, ...]]:
    """The place and the ranks of a NaN in microbatch 2, as rank 1 of 2 names them."""
    error = NonFiniteError("step 1: loss is nan.")
    error.nonfinite_terms = ((1, "loss"),)
    micro = [SimpleNamespace(index=1, data=torch.zeros(2, 3), indices=[2, 3])]
    given: Any = SimpleNamespace(micro=micro, num_micro=2)
    world: Any = SimpleNamespace(rank=1, world_size=2, gather_json=gather)
    found = explain_nonfinite_inputs(error, given, world=world, **about)
    return found.where, found.ranks


def test_a_rank_is_blamed_only_where_all_ranks_were_asked_and_each_has_its_own_loss() -> None:
    def unreachable(_: Any) -> Any:
        raise RuntimeError("Connection closed by peer")

    assert blamed(lambda own: [[[], [0]], own]) == ("the loss of microbatch 2 (rank 1), of 2 in this step", (1,))
    assert blamed(unreachable) == ("the loss of microbatch 2, of 2 in this step", ())
    assert blamed(lambda own: [[[], [0]], own], over_batch=True) == ("", ())


def test_the_terms_that_are_not_finite_are_told_with_their_microbatches() -> None:
    reduction = TotalsReduction(world=World.alone(), names=["main", "aux"], num_micro=5)
    for index in range(5):
        totals = {"main": 1.0, "aux": float("inf") if index in (1, 4) else 2.0}
        reduction.store_terms(index, {name: (torch.tensor(value), 2.0) for name, value in totals.items()})
    reduction.start()
    broken = reduction.wait_for_totals().nonfinite_terms
    assert broken == ((1, "aux"), (4, "aux"))
    held = {0: [0, 2, 4], 1: [1, 3]}
    assert (
        describe_microbatches(broken, held, num_micro=5)
        == "the term aux of microbatches 2 (rank 1), 5 (rank 0), of 5 in this step"
    )
    both = (*((index, "main") for index in range(5)), (0, "aux"))
    assert (
        describe_microbatches(both, {}, num_micro=5)
        == "the terms main, aux of microbatches 1, 2, 3, 4 and 1 more, of 5 in this step"
    )
    assert describe_microbatches((), held, num_micro=5) == ""


def test_finite_inputs_are_not_accused_and_no_parameter_is_named_where_none_is_bad() -> None:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update = OptimizerUpdate(
        named_parameters=trainable_parameters(model), optimizers=[torch.optim.SGD(model.parameters(), lr=50.0)], lr_schedulers=[], scaler=None,
        max_grad_norm=None, check_finite=True, skip_nonfinite=False, ema=None,
    )  # fmt: skip
    said = str(update.nonfinite_error(step=3, loss=float("inf")))
    assert "loss is inf, every gradient is finite." in said
    assert "inputs that are not finite" in said
    assert "every gradient is finite, but their norm is not" in str(update.nonfinite_error(step=3, loss=1.0))
    assert model.bias.grad is not None
    model.bias.grad.fill_(float("nan"))
    assert "gradients are not finite in bias." in str(update.nonfinite_error(step=3, loss=1.0))


@pytest.mark.soak
def test_a_size_that_was_given_is_not_said_to_follow_from_the_ranks(shop: Shop) -> None:
    words = ("--job.norm", "true")
    assert "batch norm:" not in shop.train("run", *words, "--train.micro_batch_size", "4", ranks=3, steps=2).out
    said = shop.train("run", *words, ranks=1, steps=4).out
    assert "batch: microbatches of 4, as at the start of this run" in said
    assert "batch norm:" not in said, said


def test_a_run_tells_what_it_decided_and_had_ended(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB.replace(OPTION, OPTION + "        early_stopping=2,\n"))
    words = ("--job.lr", "0.0", "--job.norm", "true", "--eval.every", "2")
    said = shop.train("run", *words, steps=100).out
    assert "batch norm: over microbatches of 6; this size changes the results" in said
    assert "stopped early" not in said
    saved = re.findall(r"saved \S*step-0*(\d+)[^|]*\| (\S+ KiB)", said)
    listed = re.findall(r"step +(\d+) +(\S+ KiB)", shop.run("ckpt", "ls", "run").out)
    assert set(listed) <= set(saved) and listed
    again = shop.train("run", *words, steps=100).out
    assert "this run stopped early at step 6: loss has not improved in 2 evaluations" in again
    assert "batch norm:" not in again
    shop.run("report", "run")
    page = (shop.path / "run" / "report.html").read_text()
    assert "<td>early_stopping</td><td>2</td>" in page


def test_evaluating_afterwards_leaves_the_curves_alone(shop: Shop) -> None:
    assert shop.run("train", "job.py", "--run-dir", "run", "--train.steps", "2").code == 0
    curves = {path.name: path.stat().st_size for path in (shop.path / "run" / "tb").iterdir()}
    story = {name: (shop.path / "run" / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    assert curves and shop.run("evaluate", "run").code == 0
    assert {path.name: path.stat().st_size for path in (shop.path / "run" / "tb").iterdir()} == curves
    assert {name: (shop.path / "run" / name).read_bytes() for name in story} == story
    for saved in (shop.path / "run" / "checkpoints").glob("step-*/manifest.json"):
        saved.write_text("{")
    ended = shop.run("evaluate", "run")
    assert ended.code == 2 and "none of the 1 checkpoints can be used; the newest: " in ended.err, ended.text


def test_a_run_that_stands_at_its_end_says_so_and_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def again(**settings: object) -> str:
        trained(job(), tmp_path, watch_to="console,jsonl", **settings)
        return capsys.readouterr().out

    assert "nothing left" not in again(train_steps=4)
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    first = saved.stat().st_ino
    for steps, limit in ((2, "train.steps is 2"), (4, "train.steps is 4")):
        said = again(train_steps=steps)
        assert f"nothing left to do: the run is at step 4, {limit}\n" in said and "saved " not in said
        assert saved.stat().st_ino == first and [*(tmp_path / "checkpoints").glob("step-*")] == [saved]
    said = again(train_steps=5)
    assert "nothing left" not in said and "saved " in said and "step-00000005" in said


def test_what_is_gone_on_with_from_another_folder_is_saved_in_its_own(tmp_path: Path) -> None:
    trained(job(), tmp_path / "first", train_steps=2)
    (step,) = (tmp_path / "first" / "checkpoints").glob("step-*")
    settings = {"train.steps": 2, "watch.to": "jsonl"}
    with pl.Run(job(), ranks=1, run_dir=tmp_path / "other", resume=step, settings=settings) as run:
        assert list(run.batches()) == []
    assert (tmp_path / "other" / "checkpoints" / step.name).is_dir()


@pytest.mark.soak
def test_under_torchrun_rank_0_speaks_for_all(shop: Shop) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline"]
    for words, line in (
        (["train", "job.py", "--run-dir", "run", "--train.steps", "2"], "run: run"),
        (["evaluate", "run"], "evaluating run on eval_data with 2 processes"),
    ):
        ended = shop.call([*launch, *words])
        assert ended.code == 0, ended.err
        last = [text for text in ended.out.splitlines() if text == line]
        assert len(last) == (2 if words[0] == "train" else 1), ended.out  # train: in the banner, and at the end
