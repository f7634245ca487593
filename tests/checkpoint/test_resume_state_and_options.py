"""A resumed run keeps all state, and reports each option that changed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.checkpoint.unsaved_state_warnings import UntrackedStateWarning
from paceline.errors import ResumeError
from paceline.launch.launch_environment import KERNELS_VARIABLE
from tests.trainer.test_edge_cases_of_a_run import job, trained


class Counting(nn.Module):
    """Its output depends on buffers that no `state_dict` holds, each changed in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("written", torch.zeros(1), persistent=False)
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("grown", torch.zeros(1), persistent=False)
        self.register_buffer("made", None, persistent=False)
        self.register_buffer("behind", torch.zeros(1), persistent=False)
        self.register_buffer("wide", torch.ones(1, 2).expand(3, 2), persistent=False)
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.register_buffer("listed", torch.ones(1, 2).expand(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.written += 1
            self.replaced = self.replaced + 1
            self.grown = torch.cat([self.grown, self.grown[-1:] + 1])
            self.made = torch.ones(2) if self.made is None else self.made + 1
            self.behind.data.add_(1)
            self.wide[0] += 1
        parts = [self.written, self.replaced.sum(), self.grown.sum(), self.made.sum(), self.behind, self.wide.sum()]
        scale = 1 + 0.01 * torch.stack([part.reshape(()) for part in parts]).sum()
        out: Tensor = self.linear(x) / scale + self.listed.mean()
        return out


class Told(nn.Linear):
    """A layer with extra state of several kinds."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.told: dict[str, Any] = {"calls": 0, "shape": (1, 2), "sum": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.told

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.told = state

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.told = {**self.told, "calls": self.told["calls"] + 1, "sum": self.told["sum"] + x.detach()[0, :2]}
        return super().forward(x) / (1 + 0.1 * self.told["calls"]) + self.told["sum"]


def weights(run: pl.Run) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}


def trained_weights(made: pl.Job, folder: Path, **settings: Any) -> dict[str, Tensor]:
    settings = {"watch.to": ("jsonl",), **{k.replace("_", ".", 1): v for k, v in settings.items()}}
    with pl.Run(made, ranks=1, run_dir=folder, settings=settings) as run:
        for batch in run.batches():
            run.step(batch)
        return weights(run)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("model", [Counting, Told])
def test_what_the_state_dict_leaves_out_outlives_a_resume(tmp_path: Path, model: type[nn.Module]) -> None:
    made = job(model=model, eval_data=None)
    whole = trained_weights(made, tmp_path / "whole", train_steps=6)
    for steps in (2, 4):
        trained_weights(made, tmp_path / "cut", train_steps=steps)
    assert same(trained_weights(made, tmp_path / "cut", train_steps=6), whole)
    names = sorted(path.name for path in (tmp_path / "cut" / "consolidated").iterdir())
    assert names == ["model.safetensors"]


def test_only_what_a_forward_changed_is_written_and_the_weights_hold_none_of_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trained(job(model=Counting, eval_data=None), tmp_path, train_steps=2)
    written = load_file(tmp_path / "checkpoints" / "step-00000002" / "buffers.safetensors")
    assert set(written) == {"written", "replaced", "grown", "made", "behind", "wide"}
    assert set(load_file(tmp_path / "consolidated" / "model.safetensors")) == {
        "linear.weight",
        "linear.bias",
        "listed",
    }


def test_a_resume_is_no_write_by_a_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact mode refuses a buffer that a forward changes; one that a checkpoint is copied into is none."""
    monkeypatch.setenv(KERNELS_VARIABLE, "AVX2")  # or the run would be started again as a script

    class Fixed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("scale", torch.ones(1))

    made = job(model=Fixed, eval_data=None)
    trained(made, tmp_path, train_steps=2, train_exact=True)
    trained(made, tmp_path, train_steps=4, train_exact=True)


def decayed(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8, eta_min=1e-3)


def cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)


def adam(**options: Any) -> dict[str, Any]:
    def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        first, *rest = [p for _, p in named]
        return torch.optim.AdamW([{"params": [first]}, {"params": rest, "weight_decay": 0.0}], **options)

    return {"optimizer": optimizer}


@pytest.mark.parametrize("schedule", [None, decayed, cycle])
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lr": 0.05}, "optimizer: lr was 0.01, is 0.05"),
        ({"betas": (0.5, 0.9)}, "optimizer: betas was (0.9, 0.999), is (0.5, 0.9)"),
        ({"weight_decay": 0.3}, "optimizer: weight_decay was 0.01, is 0.3 (group 0)"),
    ],
)
def test_a_changed_option_is_refused_and_holds_where_it_is_allowed(
    tmp_path: Path, schedule: Any, changed: dict[str, Any], told: str
) -> None:
    before = job(**adam(lr=0.01), lr_schedule=schedule)
    after = job(**adam(**{"lr": 0.01, **changed}), lr_schedule=schedule)
    folder = tmp_path / "run"
    trained(before, folder, train_steps=3)
    with pytest.raises(ResumeError) as refused:
        trained(after, folder, train_steps=6)
    assert told in str(refused.value) and "--allow optimizer" in str(refused.value)

    expected = trained_options(after, tmp_path / "as if from the start", steps=6)
    assert trained_options(after, folder, steps=6, allow=["optimizer"]) == expected
    assert trained_options(after, folder, steps=7) == trained_options(after, tmp_path / "whole", steps=7)


def test_a_changed_schedule_is_refused_beside_a_changed_weight_decay(tmp_path: Path) -> None:
    """A schedule overwrites the optimizer's learning rate, so it is compared unless the learning rate has changed."""
    trained(job(**adam(lr=0.01), lr_schedule=cycle), tmp_path, train_steps=3)

    def higher(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)

    with pytest.raises(ResumeError, match=r"max_lr was 0\.1, is 0\.2"):
        trained_options(
            job(**adam(lr=0.01, weight_decay=0.3), lr_schedule=higher), tmp_path, steps=6, allow=["optimizer"]
        )


def trained_options(made: pl.Job, folder: Path, *, steps: int, allow: Sequence[str] = ()) -> list[dict[str, Any]]:
    settings = {"train.steps": steps, "watch.to": ("jsonl",)}
    with pl.Run(made, ranks=1, run_dir=folder, allow=allow, settings=settings) as run:
        for batch in run.batches():
            run.step(batch)
        return [{k: v for k, v in g.items() if k != "params"} for o in run.optimizers for g in o.param_groups]


def test_another_optimizer_that_is_allowed_starts_afresh(tmp_path: Path) -> None:
    trained(job(), tmp_path, train_steps=3)
    with pytest.raises(ResumeError, match=r"was SGD of 1 groups .*, is AdamW of 2 groups"):
        trained(job(**adam(lr=0.01)), tmp_path, train_steps=6)
    assert len(trained_options(job(**adam(lr=0.01)), tmp_path, steps=6, allow=["optimizer"])) == 2


def test_the_way_it_is_computed_is_no_change(tmp_path: Path) -> None:
    trained(job(**adam(lr=0.01)), tmp_path, train_steps=3)
    assert trained_options(job(**adam(lr=0.01, foreach=False)), tmp_path, steps=4)[0]["foreach"] is False


class Slow(torch.optim.SGD):
    """Lookahead with its slow weights in a list, an inner optimizer, and a count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.slow = [[p.detach().clone()] for group in self.param_groups for p in group["params"]]
        self.inner = torch.optim.RMSprop(self.param_groups)
        self.mine = [p for group in self.param_groups for p in group["params"]]
        self.beside, self.calls, self.size, self.fixed = {"sum": torch.zeros(1)}, 0, 1.0, torch.ones(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.inner.step()
        self.calls += 1
        self.beside["sum"] = self.beside["sum"] + 1
        for (slow,), p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(p, 0.5)


def test_what_an_optimizer_keeps_and_no_checkpoint_has_is_told_once(tmp_path: Path) -> None:
    trained(job(optimizer=lambda named: Slow([p for _, p in named])), tmp_path, train_steps=4, checkpoint_every=2)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if "checkpoints do not contain" in event.get("text", "")]
    assert [row["level"] for row in told] == ["warning"]
    assert told[0]["text"].startswith(
        "checkpoints do not contain Slow.slow, Slow.inner, Slow.beside, Slow.calls, and a resumed run"
    )


@pytest.mark.parametrize("name", ["SGD", "AdamW", "NAdam", "ASGD", "Adafactor", "Rprop"])
def test_torch_s_own_keep_nothing_that_no_checkpoint_has(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 2))
    parameter.grad = torch.ones(3, 2)
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    unsaved = UntrackedStateWarning([optimizer])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert unsaved.warning_text() == ""
