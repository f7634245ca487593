"""Misuse of the user's own loop: the message, and what the run keeps."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.unsaved_state_warnings import UntrackedStateWarning
from paceline.data.order.batches import next_batch
from paceline.data.order.cursor import Cursor
from paceline.data.types import StepInput
from paceline.trainer.checks.evaluation_checks import last_batch_notes
from tests.conftest import Shop
from tests.trainer.test_edge_cases_of_a_run import job, trained

QUIET: dict[str, Any] = {"watch.to": ("jsonl",)}


def notes_of(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [str(event.get("text", "")) for event in events]


def banner_of(folder: Path) -> str:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return "\n".join([event for event in events if "banner" in event][-1]["banner"])


def test_a_second_loop_after_the_run_is_over_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(pl.UsageError, match=r"ended at step 3 of 3: run\.batches\(\) has no more") as refused,
        pl.Run(job(), ranks=1, run_dir=tmp_path / "a", settings=QUIET) as run,
    ):
        for _ in range(3):
            for batch in run.batches():
                run.step(batch)
    assert "train.epochs" in refused.value.hint and "one loop" in refused.value.hint
    assert (tmp_path / "a" / "checkpoints" / "latest").read_text().split()[0] == "step-00000003"
    steps = 0
    with pl.Run(job(), ranks=1, run_dir=tmp_path / "a", settings=QUIET) as run:  # over before it begins: nothing to do
        for _batch in run.batches():
            steps += 1
    with pl.Run(job(), ranks=1, run_dir=tmp_path / "b", settings=QUIET) as run:
        for _ in range(3):
            for batch in run.batches():  # left by break, and stopped: the loop below gives what is left, or nothing
                run.step(batch)
                steps += 1
                if steps == 2:
                    run.stop()
                break
    assert steps == 2


def test_a_batch_says_what_to_write_where_it_is_taken_for_tensors() -> None:
    batch = next_batch(Cursor(), num_samples=4, global_batch_size=2, micro_batch_size=2)
    given = StepInput(batch=batch, micro=())
    with pytest.raises(TypeError, match=r"can't be unpacked: run\.step\(batch\) does forward.*batch\.micro"):
        _x, _y = given
    for place in (0, "image"):
        with pytest.raises(TypeError, match=r"run\.step\(batch\) does forward.*batch\.micro"):
            given[place]
    with pytest.raises(AttributeError, match=r"has no 'to': run\.step\(batch\)"):
        given.to("cpu")
    assert not hasattr(given, "shape") and given == StepInput(batch=batch, micro=())


class Keeps(nn.Sequential):
    seen = 0

    def forward(self, x: Any) -> Any:
        self.seen += 1
        return super().forward(x)


class Counts(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().step(closure)


@pytest.mark.parametrize(("keeps", "counts"), [(True, False), (False, True), (True, True)])
def test_what_no_checkpoint_has_is_told_with_the_place_of_its_kind(keeps: bool, counts: bool) -> None:
    model = (Keeps if keeps else nn.Sequential)(nn.Linear(4, 2))
    optimizer = (Counts if counts else torch.optim.SGD)(model.parameters(), lr=0.1)
    unsaved = UntrackedStateWarning([optimizer], model=model)
    unsaved.start_tracking()
    model(torch.zeros(1, 4)).sum().backward()
    optimizer.step()
    told = unsaved.warning_text()
    assert ("self.register_buffer(" in told) == keeps and ("self.state[p]" in told) == counts
    assert ("Keeps.seen" in told) == keeps and ("Counts.calls" in told) == counts


def test_what_a_resume_suggests_it_also_takes(tmp_path: Path) -> None:
    made = job(global_batch_size=4, micro_batch_size=4)
    trained(made, tmp_path, train_steps=1)
    told = []
    for allow, micro in (((), 4), (("micro_batch_size",), 2)):
        settings = {"train.steps": 2, "watch.to": ("jsonl",), "train.micro_batch_size": micro}
        with pl.Run(made, layout="threads", ranks=2, run_dir=tmp_path, settings=settings, allow=allow) as run:
            run.stop()
        told.append(banner_of(tmp_path))
    assert "replicas get no samples" in told[0] and "--train.micro_batch_size 2 --allow micro_batch_size" in told[0]
    assert "no samples" not in told[1]


def test_a_last_batch_of_one_sample_is_left_out_by_words_that_a_resume_takes(tmp_path: Path) -> None:
    run = trained(job(global_batch_size=23, settings={"train.micro_batch_size": 23}), tmp_path, train_steps=1)
    plan, settings = run._active_session.prepared_job.plan, run._active_session.prepared_job.settings
    for is_resumed, words in (
        (False, "--data.drop_last true leaves"),
        (True, "--data.drop_last true --allow drop_last leaves"),
    ):
        found = list(last_batch_notes(plan, settings, run.model, samples=24, total_steps=4, is_resumed=is_resumed))
        assert len(found) == 1 and words in found[0]


def test_after_an_early_stop_the_words_for_the_best_weights_are_told(tmp_path: Path) -> None:
    scores = iter([1.0, 3.0, 2.0, 1.0, 0.0])
    made = job(best="score:max", early_stopping=2, on_eval=lambda run: {"score": next(scores)})
    trained(made, tmp_path / "a", eval_every=1, train_steps=9)
    told = [text for text in notes_of(tmp_path / "a") if "consolidated/ has the weights of step" in text]
    assert len(told) == 1 and "step 4, the last one; the best weights are from step 2:" in told[0]
    assert told[0].endswith(f"paceline ckpt consolidate {tmp_path / 'a'} --best --to best")
    rising = iter(range(9))
    trained(
        job(best="score:max", on_eval=lambda run: {"score": next(rising)}), tmp_path / "b", eval_every=1, train_steps=2
    )
    assert not [text for text in notes_of(tmp_path / "b") if "the best weights are from" in text]


def test_without_eval_data_a_run_has_no_evaluation_and_says_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = pl.train(job(eval_data=None, name="bare"), settings={"train.steps": 1}, run_dir="run")
    assert found.evaluation is None and found.step == 1 and len(found.digest) == 64
    given = job()
    capsys.readouterr()
    found = pl.evaluate("run", job=given)
    told = capsys.readouterr().out
    assert "the job: the object that was passed" in told and "object:" not in told and found.samples == 8


@pytest.mark.parametrize("part", [torch.zeros(3), "many", None])
def test_a_metric_of_another_form_is_named(part: Any, tmp_path: Path) -> None:
    for given in ((part, 3), (3.0, part)):
        made = job(metrics={"accuracy": lambda output, batch, given=given: given})
        with (
            pytest.raises(pl.JobError, match=r"the metric 'accuracy' returned a value of .*two numbers"),
            pl.Run(made, ranks=1, run_dir=tmp_path, settings=QUIET) as run,
        ):
            run.evaluate()


def test_an_optimizer_step_of_the_script_is_refused_at_the_next_step(tmp_path: Path) -> None:
    with (
        pytest.raises(pl.UsageError, match=r"outside run\.step\(batch\), which already updates"),
        pl.Run(job(), ranks=1, run_dir=tmp_path / "a", settings=QUIET) as run,
    ):
        (optimizer,) = run.optimizers
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
    optimizer.step()  # the hook is gone with the run
    assert run._update_guard is None and not optimizer._optimizer_step_post_hooks


ON_RANK_0 = """
import paceline as pl
from job import make_job
with pl.Run(make_job(), run_dir="run", ranks=2, settings={"train.steps": 4}) as run:
    for batch in run.batches():
        run.step(batch)
    if run.rank == 0:
        print(run.evaluate().metrics)
"""


def test_a_call_on_rank_0_alone_is_named(shop: Shop) -> None:
    shop.write("script.py", ON_RANK_0)
    ended = shop.call([sys.executable, "script.py"])
    assert ended.code == 2, ended.text
    assert (
        "rank 0 is at run.evaluate(), and rank 1 at the end of the run: every rank must make the same calls"
        in ended.err
    )


def _clamped() -> nn.Module:
    model = nn.Linear(4, 2)
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


@pytest.mark.parametrize("count", [None, lambda batch: len(batch[1])])
def test_a_hook_on_a_parameter_gets_the_gradient_of_a_sum_and_the_run_warns(tmp_path: Path, count: Any) -> None:
    with pl.Run(job(model=_clamped, count=count), ranks=1, run_dir=tmp_path, settings=QUIET):
        pass
    assert ("the hook on weight gets the gradient of one microbatch's loss sum" in banner_of(tmp_path)) == (
        count is None
    )
