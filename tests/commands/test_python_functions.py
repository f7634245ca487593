"""The commands as Python functions: with a Job or its file, repeatedly in one process, with the keys of `--json`."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.checkpoint.files.checkpoint_folder import open_checkpoint
from paceline.config.resume_allowances import ALLOWED_DIFFERENCES
from paceline.job_transfer import open_job_file, receive_job
from tests.conftest import Shop

pytestmark = pytest.mark.one_worker


class Squares(torch.utils.data.Dataset[Any]):
    """A dataset of the test's own."""

    def __init__(self) -> None:
        self.x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.x[index].square().sum(0, keepdim=True)


def make(width: int = 8, **changes: Any) -> pl.Job:
    fields: dict[str, Any] = {
        "model": lambda: torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)),
        "loss": lambda output, batch: (F.mse_loss(output, batch[1], reduction="sum"), len(batch[1])),
        "train_data": Squares(),
        "eval_data": Squares(),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9),
        "global_batch_size": 8,
        "name": "squares",
    }
    return pl.Job(**fields | changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_job_is_trained_planned_and_evaluated_in_one_process(folder: Path) -> None:
    job, halves = make(), {"train.micro_batch_size": 4}
    found = pl.train(job, ranks=2, settings={"train.steps": 3, "train": {"exact": True}, **halves}, run_dir="run")
    assert found.exit_code == 0 and found.step == 3 and found.run == "run"
    again = pl.train(job, settings={"train.steps": 3, "train.exact": True, **halves}, run_dir="single")
    assert again.digest == found.digest
    saved = open_checkpoint(folder / "run" / "checkpoints" / "step-00000003").state["identity"]
    assert set(saved) | {"order"} == set(ALLOWED_DIFFERENCES)
    metrics = pl.evaluate("run", job=job, ranks=1).metrics
    assert metrics.loss == found.evaluation.metrics["loss"]
    plans = [pl.plan(job, cluster="2xH100-80G") for _ in range(2)]
    assert plans[0].recommended == plans[1].recommended
    assert plans[0].plans[0].fits and plans[0].case == 1
    with pytest.raises(pl.UsageError, match="is a Python object") as refused:
        pl.evaluate("run")
    assert "job=job" in refused.value.hint
    code = "import sys; from paceline.cli import main; sys.exit(main(['evaluate', 'run']))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 2 and "is a Python object" in told.stderr


def test_verify_has_the_keys_of_the_command(folder: Path) -> None:
    found = pl.verify(make(), layout="fsdp", ranks=2, steps=2)
    assert found.verdict in ("bitwise", "rounding") and found.exit_code == 0
    assert found.layout == "fsdp" and found.ranks == 2 and found.first_difference is None
    assert json.loads(json.dumps(found.as_json()))["verdict"] == found["verdict"]
    assert str(found).endswith(
        ("(bit for bit)", "(equal up to rounding: no tensor differs by more than its noise floor)")
    )
    with pytest.raises(AttributeError, match="verdict"):
        _ = found.verdct


def test_a_difference_is_a_result_and_a_failure_is_an_error(folder: Path) -> None:
    def by_rank(output: Any, batch: Any) -> Any:
        return F.mse_loss(output, batch[1], reduction="sum") * (1 + int(os.environ["RANK"])), len(batch[1])

    def broken(output: Any, batch: Any) -> Any:
        raise ValueError("no loss today")

    assert pl.verify(make(loss=by_rank), ranks=2, steps=1).exit_code == 4
    with pytest.raises(pl.RunError, match="ValueError: no loss today") as failed:
        pl.train(make(loss=broken), ranks=2, settings={"train.steps": 2})
    assert failed.value.where.startswith("rank ") and "test_python_functions.py" in failed.value.where
    assert any(".log" in note for note in failed.value.__notes__)
    with pytest.raises(pl.JobError, match="train_data"):
        pl.train(make(train_data=None))
    with pytest.raises(pl.LayoutError, match="pp=3"):
        pl.verify(make(), layout="pp=3", ranks=2)


def test_a_job_crosses_with_what_it_shares_and_its_own_classes() -> None:
    table = torch.arange(6.0)
    job = make(train_data=[table, table[2:]], settings={"train.steps": 2})
    with open_job_file(job) as handle:
        first, second = receive_job(handle), receive_job(handle)
    assert first.train_data[0].untyped_storage().data_ptr() == first.train_data[1].untyped_storage().data_ptr()
    assert torch.equal(second.train_data[1], table[2:])
    assert first.model()[0].weight.shape == (8, 4) and first.settings == {"train.steps": 2}


def test_what_is_imported_by_name_is_found_by_the_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lib").mkdir()
    (folder / "lib" / "only_here.py").write_text("def loss(output, batch): return output.square().sum(), len(output)\n")
    monkeypatch.syspath_prepend(folder / "lib")
    module = importlib.import_module("only_here")
    assert pl.train(make(loss=module.loss), settings={"train.steps": 1}).step == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (make, "the job is a function"),
        (None, "the job is a NoneType"),
        ("", "the job is empty"),
        ("nowhere.py", "nowhere.py does not exist"),
        ("object:squares", "is a Python object"),
    ],
)
def test_what_is_no_job_is_refused(folder: Path, given: Any, says: str) -> None:
    with pytest.raises(pl.UsageError, match=says):
        pl.verify(given)


def test_what_cannot_be_sent_is_named(folder: Path) -> None:
    with Path("data").open("w") as file, pytest.raises(pl.JobError, match="train_data= can't be pickled"):
        pl.train(make(train_data=[file]))
    with pytest.raises(pl.UsageError, match=r"job\.lr is a parameter of make_job"):
        pl.train(make(), settings={"job.lr": 1.0})
    with pytest.raises(pl.UsageError, match=r"did you mean 'train\.steps'"):
        pl.train(make(), settings={"train.stps": 1})
    with pytest.raises(pl.UsageError, match=r"pl\.compare got ranks"):
        pl.compare("a", "b", ranks=2)


@pytest.mark.soak
def test_a_script_a_pipe_and_torchrun_say_the_same(shop: Shop) -> None:
    source = textwrap.dedent("""
        import paceline as pl
        from job import make_job
        {own}
        if __name__ == "__main__":
            found = pl.verify({job}, ranks={ranks}, steps=1)
            print("verdict", found.get("verdict"))
        """)
    own = "def loss(output, batch): return output.square().sum(), len(output)\nimport dataclasses"
    changed = "dataclasses.replace(make_job(), loss=loss)"
    shop.write("script.py", source.format(own=own, job=changed, ranks=2))
    assert "verdict bitwise" in shop.call([sys.executable, "-W", "ignore", "script.py"]).out
    piped = f"{sys.executable} -W ignore - < script.py"
    assert "verdict bitwise" in shop.call(["sh", "-c", piped], environ={"PYTHONPATH": str(shop.path)}).out
    shop.write("script.py", source.format(own=own, job=changed, ranks=None))
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    assert "verdict bitwise" in shop.call(run).out


@pytest.mark.parametrize("value", [{"nope": 1}, {"train.step": 1}, {"train": {"stepz": 1}}, {"train.steps": "many"}])
def test_a_wrong_setting_is_said_to_be_of_the_argument_that_brought_it(folder: Path, value: dict[str, Any]) -> None:
    """Not of a command line that nobody typed, nor of a job that is right."""
    verbs: dict[str, Callable[[], Any]] = {
        "settings=": lambda: pl.train(make(), settings=value),
        "settings= ": lambda: pl.verify("job.py", ranks=1, settings=value),
        "Run(settings=)": lambda: pl.Run(make(), ranks=1, settings=value),
        "Job(settings=)": lambda: pl.Run(make(settings=value), ranks=1),
        "pl.place(settings=)": lambda: pl.place(lambda: torch.nn.Linear(1, 1), settings=value),
    }
    for where, call in verbs.items():
        with pytest.raises(pl.UsageError) as refused:
            call()
        assert refused.value.where == where.strip()
        assert "paceline config" not in refused.value.hint
        assert ("did you mean" in refused.value.cause) == ("nope" not in value and "train.steps" not in value)
