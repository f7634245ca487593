"""Edge cases of a run that once failed: NaN metrics, early stopping, averages, limits, tied weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from paceline.commands import ckpt
from paceline.data.order.cursor import Cursor
from paceline.errors import JobError
from paceline.trainer.setup.duration import Length
from tests.conftest import Shop


def job(**more: Any) -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 4, generator=generator), torch.randint(0, 2, (24,), generator=generator)
    values: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
        "loss": lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
        "train_data": torch.utils.data.TensorDataset(x, y),
        "eval_data": torch.utils.data.TensorDataset(x[:8], y[:8]),
        "optimizer": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        "global_batch_size": 8,
    }
    return pl.Job(**{**values, **more})


def trained(made: pl.Job, folder: Path, **settings: Any) -> pl.Run:
    settings = {"train.steps": 6, "watch.to": ("jsonl",), **{k.replace("_", ".", 1): v for k, v in settings.items()}}
    with pl.Run(made, ranks=1, run_dir=folder, settings=settings) as run:
        for batch in run.batches():
            run.step(batch)
    return run


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_nan_is_never_the_best(tmp_path: Path) -> None:
    values = iter([math.nan, 2.0, 5.0, 4.0, 3.0, 1.0])
    trained(job(best="score:max", on_eval=lambda run: {"score": next(values)}), tmp_path, eval_every=1)
    assert (tmp_path / "checkpoints" / "best").read_text().split()[0] == "step-00000003"


def test_early_stopping_has_a_best_of_its_own(tmp_path: Path) -> None:
    numbers = iter(range(100))
    rule = pl.EarlyStopping(metric="falling", mode="min", patience=2)
    made = job(
        best="score:max", early_stopping=rule, on_eval=lambda run: {"falling": -float(next(numbers)), "score": 1.0}
    )
    trained(made, tmp_path, eval_every=1, train_steps=9)
    assert rows(tmp_path)[-1]["step"] == 9


def test_a_skipped_step_leaves_no_nan_in_running_statistics(tmp_path: Path) -> None:
    x = torch.randn(24, 4)
    x[3] = math.nan
    made = job(train_data=torch.utils.data.TensorDataset(x, torch.zeros(24, dtype=torch.long)), order="sequential")
    run = trained(made, tmp_path, train_on_nonfinite="skip")
    del run
    from safetensors.torch import load_file

    found = load_file(tmp_path / "consolidated" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in found.values()) and int(found["1.num_batches_tracked"]) == 4


def test_an_average_that_a_resume_adds_begins_at_the_weights(tmp_path: Path) -> None:
    plain = {"model": lambda: nn.Linear(4, 2)}
    trained(job(**plain), tmp_path, train_steps=6, eval_every=6)
    before = [row["eval/loss"] for row in rows(tmp_path) if "eval/loss" in row][-1]
    trained(job(ema=0.999, **plain), tmp_path, train_steps=7, eval_every=7)
    after = [row["eval/loss"] for row in rows(tmp_path) if "eval/loss" in row][-1]
    assert after == pytest.approx(before, rel=1e-3)  # one step moves it by a thousandth


def test_a_negative_count_is_refused(tmp_path: Path) -> None:
    made = job(loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), -len(output)))
    with pytest.raises(JobError, match="which is not a number of targets"):
        trained(made, tmp_path)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"steps": 50, "epochs": 1.0}, 7),
        ({"steps": 5, "epochs": 1.0}, 5),
        ({"epochs": 3.0, "samples": 16}, 2),
        ({"epochs": 0.5}, 4),
        ({"samples": 100}, 14),
    ],
)
def test_the_first_limit_that_is_reached_ends_the_run(limits: dict[str, Any], steps: int) -> None:
    length = Length(epoch_samples=50, **limits)
    assert length.total_steps(batch=8, drop_last=False) == steps


def test_limits_of_a_stream() -> None:
    length = Length(steps=9, epochs=2.0)
    assert length.total_steps(batch=8, drop_last=False) == 9
    assert length.is_open
    assert length.is_reached(Cursor(epoch=2, step=4), tokens=0)
    assert not length.is_reached(Cursor(epoch=1, step=4), tokens=0)


def test_the_logged_learning_rate_is_the_step_s_own(tmp_path: Path) -> None:
    made = job(lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    trained(made, tmp_path, log_every=1, train_steps=3)
    assert [row["lr"] for row in rows(tmp_path) if "lr" in row] == [0.1, 0.05, 0.025]


class Tied(nn.Module):
    """As models of transformers are: one weight under two names, of which it says that it makes the second itself."""

    _tied_weights_keys = ("out.weight",)

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x: Any) -> Any:
        return self.out(self.words(x))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_consolidated_under_each_of_its_names(tmp_path: Path, tied: bool) -> None:
    x = torch.arange(24) % 7
    data = torch.utils.data.TensorDataset(x, x)
    trained(job(model=lambda: Tied(tied), train_data=data, eval_data=None), tmp_path / "run", train_steps=3)
    stored = load_file(tmp_path / "run" / "consolidated" / "model.safetensors")
    assert torch.equal(stored["words.weight"], stored["out.weight"]) == tied
    assert not Tied(tied).load_state_dict(stored).missing_keys
    ckpt.consolidate(str(tmp_path / "run"), to=tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(stored) and all(torch.equal(again[name], stored[name]) for name in again)


@pytest.mark.soak
def test_expanded_buffers_changed_optimizers_closed_pipes_and_broken_plans(shop: Shop) -> None:
    from tests.conftest import SMALL_JOB

    shop.write(
        "job.py",
        SMALL_JOB.replace(
            "        self.second =",
            "        self.register_buffer('m', torch.ones(1, 2).expand(4, 2), persistent=False)\n        self.second =",
        ),
    )
    assert shop.train("run", ranks=2, steps=3).code == 0
    (shop.path / "run" / "plan.json").write_text("{")
    assert shop.train("run", ranks=2, steps=4).code == 0
    schedule = "lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.9),"
    text = (shop.path / "job.py").read_text()
    assert schedule in text
    shop.write("job.py", text.replace(schedule, ""))
    ended = shop.train("run", ranks=2, steps=5)
    assert ended.code == 2 and "schedule: was StepLR, is none" in ended.err, ended.text
