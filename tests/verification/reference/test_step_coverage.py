"""verify lists what the compared steps did not exercise: each statement where it is true, and nowhere else."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.config.task import Task
from paceline.trainer.setup.prepare import PreparedJob, prepare
from paceline.verification.reference.reference import Reference, ReferenceConfig, RunPosition
from paceline.verification.reference.step_coverage import CoverageRecorder, StepCoverage, coverage_gaps
from tests.conftest import Shop
from tests.verification.test_detection_thresholds import WIDTH, job_of, verify

START = RunPosition(steps_done=0, epoch=0, batch_start=0)


pytestmark = pytest.mark.usefixtures("single_thread")


def gaps_of(job: pl.Job, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """The statements of a real verify, on one rank."""
    answer = verify(job, None, monkeypatch, **settings)
    assert answer["verdict"] in ("bitwise", "rounding"), answer["lines"]
    gaps: list[str] = answer["not_exercised"]
    assert [f"  not exercised: {gap}" for gap in gaps] == answer["lines"][-1 - len(gaps) : -1]
    return gaps


def starts(gaps: list[str], start: str) -> bool:
    return any(gap.startswith(start) for gap in gaps)


def masked(output: Tensor, batch: Any) -> Any:
    kept = batch[1] != 3
    return F.cross_entropy(output[kept], batch[1][kept], reduction="sum"), kept.sum()


def decaying(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def late(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 100)


class Dropping(nn.Module):
    """Dropout without a module that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(F.dropout(torch.tanh(self.first(x)), 0.5, self.training))
        return found


def test_a_plain_job_has_few_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaps_of(job_of(), monkeypatch) == [
        "a split over ranks: the layout has one rank",
        "weighting: all microbatches of a step have equal counts, so a wrong weight would not show",
        "random numbers, such as dropout: another seed gives the same gradient",
    ]


@pytest.mark.parametrize(
    ("start", "job", "settings", "other_job", "other_settings"),
    [
        ("accumulation", replace(job_of(), micro_batch_size=8), {}, job_of(), {}),
        ("weighting", job_of(), {}, job_of(loss=masked), {}),
        ("random numbers", job_of(), {}, replace(job_of(), model=Dropping), {}),
        ("random numbers", job_of(norm=True), {}, replace(job_of(), model=lambda: nn.Sequential(
            nn.Linear(WIDTH, 4), nn.Dropout(0.1))), {}),
        ("clipping", job_of(), {"train.max_grad_norm": "1e6"}, job_of(), {"train.max_grad_norm": "1e-3"}),
        ("clipping", job_of(), {"train.max_grad_norm": "1e6"}, job_of(), {}),
        ("the schedule", job_of(lr_schedule=late), {}, job_of(lr_schedule=decaying), {}),
        ("the schedule", job_of(lr_schedule=late), {}, job_of(), {}),
    ],
)  # fmt: skip
def test_a_statement_is_made_of_the_job_that_it_is_true_of(
    start: str,
    job: pl.Job,
    settings: dict[str, str],
    other_job: pl.Job,
    other_settings: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert starts(gaps_of(job, monkeypatch, **settings), start)
    assert not starts(gaps_of(other_job, monkeypatch, **other_settings), start)


class Routed(nn.Module):
    """Stacked experts, in the interface of `ep`; some of them get no token."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, 4) * 0.3)
        self.scale = nn.Parameter(torch.ones(num_experts))

    def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        chosen = expert_index[:, 0]
        return torch.einsum("ni,nio->no", tokens, self.up[chosen]) * self.scale[chosen, None] * expert_weight


class Mixture(nn.Module):
    def __init__(self, used: int, *, listed: bool) -> None:
        super().__init__()
        self.gate, self.used = nn.Linear(WIDTH, 1), used
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(5)) if listed else Routed(5)

    def forward(self, x: Tensor) -> Tensor:
        index, weight = torch.arange(len(x))[:, None] % self.used, self.gate(x).sigmoid()
        if isinstance(self.experts, Routed):
            found: Tensor = self.experts(x, index, weight)
            return found
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = torch.where(index[:, 0] == number)[0]
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows])
        return out


def test_experts_without_tokens_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(job_of(), micro_batch_size=8)
    stacked = gaps_of(replace(job, model=lambda: Mixture(3, listed=False)), monkeypatch)
    assert "2 experts of experts without tokens, or without a gradient: 3, 4" in stacked
    listed = gaps_of(replace(job, model=lambda: Mixture(4, listed=True)), monkeypatch)
    assert (
        "2 parameters whose gradient is absent or zero, as that of an expert without tokens: experts.4.weight, "
        "experts.4.bias" in listed
    )
    for is_list in (False, True):
        gaps = gaps_of(replace(job, model=lambda is_list=is_list: Mixture(5, listed=is_list)), monkeypatch)
        assert not any("without tokens" in gap for gap in gaps), gaps


class Partial(nn.Module):
    """An unused layer, and a bias that the softmax cancels: its gradient is rounding only."""

    def __init__(self, *, unused: bool, shift: bool, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 4)
        if unused:
            self.spare = nn.Linear(3, 3)
        if shift:
            self.shift = nn.Parameter(torch.zeros(1))
        if frozen:
            self.spare.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x)))
        return found + self.shift if hasattr(self, "shift") else found


def test_parameters_without_a_gradient_or_with_one_of_rounding_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = gaps_of(replace(job_of(), model=lambda: Partial(unused=True, shift=True)), monkeypatch)
    assert "2 parameters whose gradient is absent or zero: spare.weight, spare.bias" in gaps
    assert "1 parameter whose gradient is rounding only: shift" in gaps
    gaps = gaps_of(replace(job_of(), model=lambda: Partial(unused=True, shift=False, frozen=True)), monkeypatch)
    assert not any("gradient is" in gap for gap in gaps), gaps


def small(factor: float) -> Any:
    class Small(nn.Module):
        """A parameter with a true gradient that is tiny in both precisions."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.tiny = nn.Linear(WIDTH, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.first(x) + self.tiny * factor
            return found

    return Small


def test_a_true_gradient_that_is_tiny_is_not_called_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = gaps_of(replace(job_of(), model=small(1e-14)), monkeypatch)
    assert not any("gradient is" in gap for gap in gaps), gaps


class Frozen(nn.Module):
    """A BatchNorm that stays in evaluation mode, or that trains."""

    def __init__(self, *, evaluates: bool) -> None:
        super().__init__()
        self.norm, self.layer, self._evaluates = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4), evaluates

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        if self._evaluates:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.norm(x))
        return found


@pytest.mark.parametrize("evaluates", [False, True])
def test_running_statistics_that_do_not_change_are_named(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = gaps_of(replace(job_of(), model=lambda: Frozen(evaluates=evaluates)), monkeypatch)
    assert ("running statistics that did not change: norm" in gaps) is evaluates


@pytest.mark.parametrize(
    ("job", "merged", "has_counts"), [(job_of(), 1, True), (job_of(), 2, False), (job_of(loss_over="batch"), 1, False)]
)
def test_microbatches_are_weighted_by_counts_unless_they_form_one_batch(
    job: pl.Job, merged: int, has_counts: bool
) -> None:
    config = ReferenceConfig(seed=0, global_batch_size=8, micro_batch_size=4, merged_microbatches=merged)
    reference, position = Reference(job=job, config=config, cast=lambda batch: batch), START
    recorder = CoverageRecorder(reference, replicas=2)
    assert recorder.as_json() == {}
    recorder.record_gradient(reference.compute_gradient(position), position=position, num_microbatches=2)
    assert recorder.as_json()["has_counts"] is has_counts


# Statements about layouts of several ranks, from the record of a step


def prepared(layout: str, *, ranks: int, update: str = "sync", compress: str = "none", **settings: str) -> PreparedJob:
    task = Task(
        verb="verify", job="job.py", ranks=ranks, layout=layout, update=update, compress=compress, settings=settings
    )
    return prepare(task, job=replace(job_of(), micro_batch_size=2))


def gaps_from(ready: PreparedJob, *, compares_gradients: bool = True, **fields: Any) -> list[str]:
    given = {"num_updates": 2, "num_learning_rates": 1, "max_microbatches": 4, "max_accumulated": 2, **fields}
    coverage = vars(StepCoverage(**given))
    return coverage_gaps(
        [coverage], plan=ready.plan, settings=ready.settings, draws_random_numbers=True,
        compares_gradients=compares_gradients,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "ranks", "expected"),
    [
        ("ddp", 2, []),
        ("ddp", 1, ["a split over ranks: the layout has one rank"]),
        ("single", 1, ["a split over ranks: the layout has one rank"]),
        ("fsdp", 2, []),
        ("dp=2,tp=1,pp=1", 2, ["pp: this axis has one rank", "tp: this axis has one rank"]),
        ("threads=2", 2, []),
        ("hsdp,dp_shard=2", 2, ["dp_replicate: this axis has one rank"]),
    ],
)
def test_axes_of_one_rank_are_named(layout: str, ranks: int, expected: list[str]) -> None:
    assert gaps_from(prepared(layout, ranks=ranks)) == expected


def test_replicas_without_samples_are_named() -> None:
    ready = prepared("ddp", ranks=4)
    assert gaps_from(ready, max_microbatches=3) == ["1 of 4 replicas: no step has samples for them"]
    assert gaps_from(ready, max_microbatches=4) == []


def test_a_single_step_does_not_use_the_optimizers_state() -> None:
    ready = prepared("ddp", ranks=2)
    text = "the optimizer's state, such as momentum: the second step is the first to use it"
    assert gaps_from(ready, num_updates=1, has_optimizer_state=True) == [text]
    assert gaps_from(ready, num_updates=1) == gaps_from(ready, num_updates=2, has_optimizer_state=True) == []


def test_clipping_hides_a_factor_only_where_gradients_are_not_compared() -> None:
    ready = prepared("ddp", ranks=2, compress="topk,ratio=0.1", **{"train.max_grad_norm": "1.0"})
    text = "a constant factor of the gradient: every step clips, which hides it"
    assert text in gaps_from(ready, compares_gradients=False, num_norms=2, num_clipped=2)
    assert text not in gaps_from(ready, compares_gradients=False, num_norms=2, num_clipped=1)
    assert text not in gaps_from(ready, num_norms=2, num_clipped=2)


def test_a_second_epoch_is_named_where_more_steps_would_reach_it() -> None:
    ready = prepared("ddp", ranks=2, compress="topk,ratio=0.1")
    text = "a second epoch: all compared steps are in the first one (--steps)"
    assert text in gaps_from(ready, compares_gradients=False)
    assert text not in gaps_from(ready, compares_gradients=False, last_epoch=1)
    assert text not in gaps_from(ready)
    short = prepared("ddp", ranks=2, compress="topk,ratio=0.1", **{"train.epochs": "1"})
    assert text not in gaps_from(short, compares_gradients=False)


def test_zeros_of_a_compressed_gradient_are_not_named() -> None:
    fields: dict[str, Any] = {"zero_gradients": ["a"], "absent_gradients": ["b"], "idle_experts": {"c": [1]}}
    compressed = gaps_from(prepared("ddp", ranks=2, compress="topk,ratio=0.1"), **fields)
    assert compressed == ["1 parameter without a gradient: b"]
    assert gaps_from(prepared("ddp", ranks=2), **fields) == [
        "2 parameters whose gradient is absent or zero: b, a",
        "1 expert of c without tokens, or without a gradient: 1",
    ]


def test_the_loss_scale_of_fp16_does_not_change() -> None:
    text = "changes of the fp16 loss scale: verify keeps it fixed"
    assert gaps_from(prepared("ddp", ranks=2, **{"train.precision": "fp16"})) == [text]
    assert text not in gaps_from(prepared("ddp", ranks=2, **{"train.precision": "bf16"}))


def test_dropout_that_verify_switches_off_is_named() -> None:
    ready = prepared("ddp", ranks=2)
    arguments: dict[str, Any] = {"plan": ready.plan, "settings": ready.settings, "draws_random_numbers": True}
    coverage = vars(StepCoverage(max_microbatches=4, max_accumulated=2))
    assert coverage_gaps([coverage], has_dropout_off=True, **arguments) == [
        "dropout: it is off in this comparison, because of sync_bn"
    ]
    assert coverage_gaps([coverage], **arguments) == coverage_gaps([{}], **arguments) == []


def test_a_different_training_has_no_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = verify(job_of(), lambda setup: setup.model.get_parameter("first.weight").data.mul_(2), monkeypatch)
    assert answer["verdict"] == "different" and answer["not_exercised"] == []


# Runs of the command


def test_the_command_and_its_files_have_the_statements(shop: Shop) -> None:
    ended = shop.run("verify", "job.py", "--ranks", "2", "--job.dropout", "0.3", "--run-dir", "run", "--json")
    answer = ended.json()
    assert answer["not_exercised"] == [
        "accumulation: each replica has one microbatch a step",
        "the schedule of the learning rate: it is constant in these steps",
    ], ended.text
    assert answer == json.loads((shop.path / "run/answer-verify.json").read_text())


def test_dropout_under_sync_bn_is_not_exercised(shop: Shop) -> None:
    words = ("--ranks", "2", "--job.norm", "true", "--job.dropout", "0.3", "--train.buffers", "sync_bn")
    ended = shop.run("verify", "job.py", *words, "--train.micro_batch_size", "3", "--json")
    assert ended.json()["not_exercised"] == [
        "1 parameter whose gradient is rounding only: first.bias",  # BatchNorm subtracts it
        "dropout: it is off in this comparison, because of sync_bn",
        "the schedule of the learning rate: it is constant in these steps",
    ], ended.text


@pytest.mark.parametrize("words", [
    ("--ranks", "2", "--compress", "topk,ratio=0.5"),
    ("--ranks", "2", "--update", "local,every=2"),
    ("--ranks", "3", "--update", "ps,staleness=2"),
])  # fmt: skip
def test_rules_that_are_compared_after_their_updates_hide_a_clipped_factor(shop: Shop, words: tuple[str, ...]) -> None:
    job = (shop.path / "job.py").read_text().replace("max_grad_norm=1.0", "max_grad_norm=1e-3")
    shop.write("job.py", job)
    answer = shop.run("verify", "job.py", *words, "--steps", "6", "--json").json()
    assert answer["verdict"] in ("bitwise", "rounding"), answer["lines"]
    gaps = answer["not_exercised"]
    assert "a constant factor of the gradient: every step clips, which hides it" in gaps
    assert starts(gaps, "random numbers") and not starts(gaps, "a second epoch") and not starts(gaps, "the schedule")
