"""A plan recommends no layout that a run would refuse, and reports why it skipped one."""

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.commands.common.execution import RunOptions, make_task
from paceline.commands.plan import plan
from paceline.commands.simulate import simulate
from paceline.config.layout import parse_layout
from paceline.config.settings import Settings
from paceline.config.update_rule import parse_update
from paceline.errors import JobError
from paceline.measured_planning.auto_layout import apply_layout
from paceline.measured_planning.choose_layout import ChosenLayout, choose_layout
from paceline.measured_planning.finalist_replay import CandidateChecker
from paceline.measured_planning.memory_replay import replay
from paceline.measured_planning.plan_local import ProfiledJob, profile_for_plan
from paceline.measured_planning.profile.batch_scaling_fit import fit_batch_scaling
from paceline.measured_planning.profile.sample_batches import FEW_SAMPLES, MORE_SAMPLES
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.planner.model_costs.model_profile import BatchScaling
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.planner.search.search_space import SearchSpace
from paceline.planner.search.shortlist import RejectedLayout
from paceline.run_folder.plan_file import read_advice
from paceline.trainer.setup.prepare import prepare
from tests.planner.advice.test_named_layouts import answer, made

pytestmark = pytest.mark.one_worker  # what they share is made once
WIDTH, LENGTH = 64, 16
THIS = "tests.measured_planning.test_plan_skips_refused_layouts"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Mixes(Block):
    """Written out by hand: cut along the sequence, a position sees others of its part only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.softmax(x @ x.transpose(1, 2) / WIDTH, -1) @ x)


class Choosy(Block):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 4:
            raise ValueError("four are too many, or too few")
        return super().forward(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.line(x)))


class Guarded(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("numbers have exploded")
        return super().forward(x)


class Halved(Block):
    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x * 0.5
        return super().forward(x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True)
        out: Tensor = self.last(nn.utils.rnn.pad_packed_sequence(self.cells(rows)[0], batch_first=True)[0])
        return out


class Turned(nn.Module):
    """Changes shapes in place, as a GRU whose batch comes first does."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x)[0]).transpose_(0, 1)
        return out.transpose_(0, 1)


def frozen() -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model[:2]:
        block.requires_grad_(False)
    return model


def weighed() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.Sequential(*(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)))


MODELS = {
    "mixes": lambda: nn.Sequential(*(Mixes() for _ in range(4))),
    "frozen": frozen,
    "choosy": lambda: nn.Sequential(*(Choosy() for _ in range(4))),
    "guarded": lambda: nn.Sequential(*(Guarded() for _ in range(4))),
    "halved": lambda: nn.Sequential(*(Halved() for _ in range(4))),
    "packed": Packed,
    "turned": Turned,
    "weighed": weighed,
    "norms": lambda: nn.Sequential(*(Normed() for _ in range(4))),
}


def job(how: str = "mixes") -> pl.Job:
    shape = (WIDTH,) if how == "norms" else (LENGTH, WIDTH)
    rows = torch.randn(64, *shape, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        model=MODELS[how],
        loss=lambda output, batch: (F.mse_loss(output, batch[1], reduction="sum"), output.numel()),
        train_data=torch.utils.data.TensorDataset(rows, rows.flip(0)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        global_batch_size=8,
        sequence=None if how == "norms" else {"0": 1, "1": 1},
    )


def learnt(how: str) -> ProfiledJob:
    return learnt_of(f"{THIS}:job", f"--job.how={how}")


def learnt_of(name: str, *words: str) -> ProfiledJob:
    common = RunOptions(layout="single", ranks=1, device="cpu", quiet=True)
    return profile_for_plan(prepare(make_task("plan", name, common, list(words))), max_ranks=2)


@pytest.fixture(scope="module")
def t5() -> ProfiledJob:
    return learnt_of("tests.zoo:t5", "--job.depth=2")


def decided(found: ProfiledJob, cluster: str, *first: Candidate, grid: SearchSpace | None = None) -> ChosenLayout:
    forecast = CostModel(profile=found.profile, cluster=parse_cluster(cluster))
    rehearsal, options = CandidateChecker(ready=found.ready, original=found.original), [*map(forecast.estimate, first)]
    return choose_layout(
        rehearsal, forecast, grid=grid or SearchSpace(), deadline=time.monotonic() + 300, options=options
    )


def test_what_numbers_alone_tell_is_asked_before_it_is_recommended() -> None:
    found = decided(learnt("mixes"), "2xA100-80G", Candidate(cp=2, micro_batch_size=8))
    best = found.advice.recommended.candidate
    assert best.cp == 1 and found.best is not None and not found.best.error
    assert "gives different outputs" in found.forecast.profile.refused["cp=2"]
    assert any("gives different outputs" in line for line in found.advice.missing)


def test_what_was_refused_for_two_candidates_is_learnt_once() -> None:
    """All were to be timed here, and two were refused for the same: nothing is asked of the third."""
    found, why = learnt("norms"), "this model gives different outputs if it is split along the sequence"
    forecast = CostModel(profile=replace(found.profile, refused={}), cluster=parse_cluster("2xA100-80G"))
    lost = {Candidate(cp=2, micro_batch_size=size): RejectedLayout(reason=why) for size in (2, 4, 8)}
    rehearsal = CandidateChecker(ready=found.ready, original=found.original)
    chosen = choose_layout(rehearsal, forecast, grid=SearchSpace(), deadline=0.0, rejected=lost)
    refused = {word: said for word, said in chosen.forecast.profile.refused.items() if word.startswith("cp")}
    assert refused == {"cp in microbatches of 2": why, "cp in microbatches of 4": why, "cp=2": why}
    assert chosen.advice.recommended.candidate.cp == 1 and len(chosen.replays) == 1, (
        "one is replayed though time is over"
    )


@pytest.mark.parametrize(("size", "layouts"), [(4, [{"dp_replicate": 2}]), (1, [{"tp": 2}, {"dp_replicate": 2}])])
def test_a_size_that_the_jobs_code_refused_where_it_was_timed_is_to_blame(
    size: int, layouts: Sequence[Mapping[str, int]]
) -> None:
    """No replay refuses it; of an axis that cuts the model the same size says nothing more."""
    found = learnt("norms")
    forecast = CostModel(profile=replace(found.profile, refused={}), cluster=parse_cluster("2xA100-80G"))
    lost = {
        Candidate(**axes, micro_batch_size=size): RejectedLayout(reason="no", is_job_error=True) for axes in layouts
    }
    rehearsal = CandidateChecker(ready=found.ready, original=found.original)
    chosen = choose_layout(rehearsal, forecast, grid=SearchSpace(), deadline=0.0, rejected=lost)
    assert chosen.forecast.profile.refused[f"micro_batch_size={size}"] == "no"
    assert not {"dp_replicate", "tp"} & {*chosen.forecast.profile.refused}
    assert chosen.advice.recommended.candidate.micro_batch_size != size


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_no_time_to_measure_in_is_refused(seconds: float) -> None:
    with pytest.raises(pl.UsageError, match="is not a valid time limit"):
        plan(f"{THIS}:job", seconds=seconds)


def test_of_several_axes_the_one_to_blame_is_left_out(t5: ProfiledJob) -> None:
    assert "cp" not in t5.profile.refused  # which a run alone knows
    found = decided(t5, "4xA100-80G", Candidate(cp=2, tp=2, sequence=True, micro_batch_size=8))
    assert found.best is not None and not found.best.error
    assert {*found.forecast.profile.refused} - {*t5.profile.refused} == {"cp=2"}
    assert "two sequences" in found.forecast.profile.refused["cp=2"]


def test_numbers_of_a_model_of_two_stacks_are_never_below_nothing(t5: ProfiledJob) -> None:
    facts = t5.profile
    names = ("matmul_flops", "attention_flops", "moved_bytes", "saved_bytes", "output_bytes", "peak_bytes", "tp_bytes")
    for part in facts.parts:
        for name in names:
            for length in (1, facts.length // 4, facts.length, 4 * facts.length):
                assert getattr(part, name).evaluate(samples=1, length=length) >= 0, (part.name, name, length)


def test_what_all_samples_share_may_grow_with_their_length() -> None:
    counted = [(FEW_SAMPLES, 8), (MORE_SAMPLES, 8), (FEW_SAMPLES, 4), (FEW_SAMPLES, 2)]
    shared = [samples * 10 * length + length**2 for samples, length in counted]
    assert fit_batch_scaling(shared, 8) == BatchScaling(fixed=64.0, token=10.0)
    apart = [samples * (3 + 10 * length + length**2) + 5 for samples, length in counted]
    assert fit_batch_scaling(apart, 8) == BatchScaling(fixed=5.0, sample=3.0, token=10.0, pair=1.0)
    assert fit_batch_scaling([20.0, 10.0], None) == BatchScaling(sample=10.0)


def test_a_microbatch_that_can_not_be_had_is_no_layout() -> None:
    found = learnt("norms")
    assert "micro_batch_size=1" in found.profile.refused
    assert any("BatchNorm" in note for note in found.notes)
    best = decided(found, "8xA100-80G")
    assert all(row.estimate.candidate.micro_batch_size > 1 for row in best.advice.rows)


def test_of_a_microbatch_that_the_model_s_own_code_refuses_no_axis_is_to_blame() -> None:
    found = decided(learnt("choosy"), "2xA100-80G", Candidate(dp_replicate=2, micro_batch_size=4))
    refused, best = found.forecast.profile.refused, found.advice.recommended.candidate
    assert "four are too many" in refused["micro_batch_size=4"] and not {"dp_replicate", "pp"} & {*refused}
    assert best.micro_batch_size != 4 and found.best is not None and not found.best.error


@pytest.mark.parametrize("how", ["packed", "turned", "weighed", "halved"])
def test_models_of_all_kinds_are_planned(how: str) -> None:
    found = decided(learnt(how), "2xA100-80G", grid=SearchSpace(micro_batch_size=4))
    whole = sum(p.numel() for p in MODELS[how]().parameters())
    assert found.best is not None and not found.best.error and found.forecast.profile.parameters == whole


def test_an_error_of_the_job_s_own_code_says_where_it_is_from() -> None:
    with pytest.raises(JobError, match="numbers have exploded") as caught:
        learnt("guarded")
    assert caught.value.where.startswith(__file__) and "fake tensors" in caught.value.cause


def test_a_stage_in_which_all_is_frozen_is_replayed() -> None:
    found, layout = learnt("frozen"), parse_layout("pp=2,dp_replicate=2")
    plan = make_execution_plan(
        layout=layout,
        update=parse_update("sync"),
        resources=Resources(ranks=4),
        facts=JobFacts(global_batch_size=8, micro_batch_size=2),
    )
    settings: Settings = replace(found.ready.settings)
    first, last = replay(found.ready.job, settings, plan)
    assert first.between_steps.gradients == 0 < last.between_steps.parameters


@pytest.mark.parametrize("text", ['{"plans": 5}', '{"plans": []}', '{"plans": [1]}', "[]", "{"])
def test_a_plan_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(pl.UsageError, match="no planned layouts"):
        read_advice(tmp_path)


@pytest.mark.parametrize("part", ["facts", "cluster", "plans", "recommended"])
def test_a_plan_with_a_hole_in_it_says_where(part: str, tmp_path: Path) -> None:
    told = answer(made(), "fsdp,remat=full")
    (tmp_path / "plan.json").write_text(json.dumps(told))
    holes: dict[str, Any] = {
        "facts": {"first": {**told["facts"]["first"], "saved_bytes": None}},
        "cluster": {"devices": "many"},
        "plans": {"parts": None},
        "recommended": {},
    }
    if part == "plans":
        told["plans"][0] |= holes[part]
    elif part == "recommended":
        del told[part]
    else:
        told[part] |= holes[part]
    (tmp_path / "plan.json").write_text(json.dumps(told))
    with pytest.raises(pl.PacelineError, match=r"this plan can't be read|no layout that fits"):
        simulate(tmp_path)


def test_want_of_memory_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    found = learnt("norms")

    def short(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 1048576 bytes")

    monkeypatch.setattr("paceline.measured_planning.finalist_replay.DepthExtrapolation.replay", short)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        decided(found, "2xA100-80G")


def test_settings_of_a_plan_are_a_run_s(tmp_path: Path) -> None:
    task = make_task("train", f"{THIS}:job", RunOptions(layout="single", ranks=1, device="cpu"), [])
    rung = LayoutForecast(
        layout="pp=2", family="pp", ranks=2, peak_bytes=1, parts={}, step_seconds=1.0,
        settings={"train.micro_batch_size": "4", "place.stages": "3,1"},
    )  # fmt: skip
    settings = prepare(replace(apply_layout(replace(task, ranks=2), [rung]), layout="pp=2")).settings
    assert settings.place.stages == (3, 1) and settings.train.micro_batch_size == 4
