"""Plans of models whose sizes depend on values, and of data with samples of many lengths."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.commands.common.execution import RunOptions, make_task
from paceline.config.settings import Settings
from paceline.errors import JobError, UsageError
from paceline.measured_planning.profile.prepare_profiling import make_search_space, prepare_for_profiling
from paceline.measured_planning.profile.profile_job import profile_model
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.trainer.setup.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 96

LIBRARY = torch.library.Library("odd", "DEF")
LIBRARY.define("doubled(Tensor x) -> Tensor")
LIBRARY.define("tripled(Tensor x) -> Tensor")
LIBRARY.impl("doubled", lambda x: 2 * x, "CPU")
LIBRARY.impl("tripled", lambda x: 3 * x, "CPU")
torch.library.register_fake("odd::tripled", torch.empty_like)


class Without(nn.Module):
    """What an operation gives in it is not known before it runs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Through that operation."""
        x = self.first(x)
        if self.how == "operation":
            x = x + torch.ops.odd.doubled(x.detach())
        if self.how == "described":
            x = x + torch.ops.odd.tripled(x.detach())
        if self.how == "bins":
            x = x + torch.bincount(torch.zeros(x.numel(), dtype=torch.int64), weights=x.detach().flatten())[0]
        if self.how == "places":
            x = x + x.detach().nonzero().sum()
        if self.how == "mask":
            kept = x[x.detach() > 0]
            x = x + kept.mean()
        if self.how == "branch" and x.sum() > 0:
            x = x * 2
        found: Tensor = self.last(x)
        return found


def job(how: str = "") -> pl.Job:
    data = [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(16)]
    return pl.Job(
        model=lambda: Without(how),
        loss=lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
        train_data=data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        global_batch_size=8,
    )


def together(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def uneven(lengths: str = "many") -> pl.Job:
    data = [torch.randn(64 if n == 40 else 8 + n % 5 if lengths == "many" else 64, WIDTH) for n in range(41)]
    return pl.Job(
        model=lambda: Without(""),
        loss=lambda output, batch: (output.square().sum(), output.numel()),
        train_data=data,
        collate=together,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        global_batch_size=8,
    )


def facts_of(job: str, *typed: str) -> tuple[ModelProfile, tuple[str, ...]]:
    task = make_task("plan", job, RunOptions(layout="single", ranks=1, device="cpu", quiet=True), list(typed))
    ready, notes = prepare_for_profiling(prepare(task))
    return profile_model(ready.job, ready.settings, max_ranks=1), notes


@pytest.mark.parametrize("how", ["described", "places", "mask", "branch"])
def test_what_depends_on_numbers_is_taken_at_its_most(how: str) -> None:
    found, notes = facts_of("tests.measured_planning.test_plan_of_value_dependent_models:job", f"--job.how={how}")
    plain, _ = facts_of("tests.measured_planning.test_plan_of_value_dependent_models:job")
    assert found.parameters == plain.parameters and not notes
    assert how != "mask" or saved(found) > saved(plain)


def saved(facts: ModelProfile) -> float:
    return sum(part.saved_bytes.evaluate(samples=2, length=1) for part in facts.parts)


@pytest.mark.parametrize(
    ("how", "name", "to_do"), [("operation", "odd::doubled", "register_fake"), ("bins", "aten::bincount", "size")]
)
def test_an_operation_that_says_of_no_shapes_is_named_with_its_line(how: str, name: str, to_do: str) -> None:
    with pytest.raises(JobError) as caught:
        facts_of("tests.measured_planning.test_plan_of_value_dependent_models:job", f"--job.how={how}")
    assert name in caught.value.what and to_do in caught.value.hint
    file, line = caught.value.where.rsplit(":", 1)
    assert file == __file__ and name.split("::")[1] in Path(file).read_text().splitlines()[int(line) - 1]


def test_settings_that_leave_nothing_to_choose_are_refused() -> None:
    settings = replace(Settings(), train=replace(Settings().train, gradient_accumulation_steps=4))
    with pytest.raises(UsageError, match="each layout would have different microbatches") as caught:
        make_search_space(settings, command="paceline plan")
    assert "plan also chooses" in caught.value.cause


def test_of_samples_of_many_lengths_the_longest_is_looked_at() -> None:
    many, note = facts_of("tests.measured_planning.test_plan_of_value_dependent_models:uneven")
    alike, none = facts_of("tests.measured_planning.test_plan_of_value_dependent_models:uneven", "--job.lengths=one")
    assert "768 to 6,144 numbers (of 32 examined)" in note[0] and not none
    assert saved(many) == saved(alike)


def test_the_command_says_it_on_one_screen(tmp_path: Path) -> None:
    for words, code, said in (
        (["job", "--job.how=operation"], 2, "register_fake"),
        (["uneven"], 0, "samples have 768 to 6,144 numbers"),
        (["job", "--cluster=tiny.toml"], 2, "no layout of the model fits on tiny"),
    ):
        done = plan(f"{__file__}:{words[0]}", *words[1:], folder=tmp_path)
        assert done.returncode == code and said in done.stderr + done.stdout, done.stderr + done.stdout
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 24


def plan(*words: str, folder: Path) -> Any:
    tiny = "nodes = 1\ndevices = 1\n[device]\nname = 'tiny'\nmemory = '64 KiB'\nreserve = '1 B'\n"
    (folder / "tiny.toml").write_text(tiny + "bandwidth = '1 GB/s'\nfp32 = '1 TFLOP/s'\nbf16 = '1 TFLOP/s'\n")
    cluster = [] if any(word.startswith("--cluster") for word in words) else ["--cluster", "1xH100-80G"]
    command = [sys.executable, "-m", "paceline", "plan", *words, *cluster]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
