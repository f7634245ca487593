"""The memory of a deep model, extrapolated from few blocks, equals the whole replay byte for byte."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.memory.measured import Setting
from torch import nn

import paceline as pl
from paceline.commands.common.execution import RunOptions, make_task
from paceline.config.settings import Settings
from paceline.measured_planning import depth_extrapolation as deep
from paceline.measured_planning.memory_replay import replay
from paceline.measured_planning.profile.truncated_model import build_once
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.trainer.setup.prepare import PreparedJob, prepare

WIDE: dict[str, Any] = {"width": 2048, "heads": 16, "length": 64, "vocabulary": 256}


def ready_for(family: str, layout: str, *, ranks: int, device: str, **job: Any) -> PreparedJob:
    setting = Setting(family=family, layout=layout, ranks=ranks, batch=16, micro=2, job=job)
    common = RunOptions(ranks=ranks, layout=layout, device="cpu", quiet=True)
    ready = prepare(make_task("compare", f"benchmarks.memory.jobs:{family}", common, setting.overrides))
    plan = ready.plan if device == "cpu" else replace(ready.plan, device=device, backend="nccl")
    return replace(ready, job=build_once(ready.job, seed=0), plan=plan)


def cut(settings: Settings, blocks: tuple[int, ...]) -> Settings:
    return replace(settings, place=replace(settings.place, stages=blocks if len(blocks) > 1 else ()))


def the_same(
    layout: str, *blocks: int, ranks: int = 1, family: str = "llama", device: str = "cuda", **job: Any
) -> None:
    ready = ready_for(family, layout, ranks=ranks, device=device, **{**WIDE, "depth": sum(blocks), **job})
    settings = cut(ready.settings, blocks)
    chain = deep.DepthExtrapolation(ready.job, settings)
    assert 0 < chain.count_replayed_blocks(settings, ready.plan, blocks) < sum(blocks)
    way = chain.plan_extrapolation(settings, ready.plan, blocks)
    assert way is not None
    found = chain._extrapolate(settings, ready.plan, blocks, way)
    assert found is not None
    assert found == replay(ready.job, settings, ready.plan)


@pytest.mark.parametrize(
    ("layout", "ranks"), [("single", 1), ("fsdp,remat=full", 2), ("tp=2,sequence=true", 2)], ids=str
)
def test_few_blocks_tell_what_many_hold(layout: str, ranks: int) -> None:
    the_same(layout, 14, ranks=ranks)


def test_a_pipeline_of_uneven_stages_is_told_by_few_blocks() -> None:
    the_same("pp=2", 15, 12, ranks=2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "ranks", "blocks"),
    [
        ("ddp,remat=selective", 2, (24,)),
        ("zero1", 2, (24,)),
        ("zero2", 2, (24,)),
        ("fsdp", 2, (24,)),
        ("pp=2,schedule=gpipe", 2, (16, 16)),
        ("pp=2,schedule=zb_h1", 2, (14, 18)),
        ("pp=2,dp_shard=2,zero=2", 4, (16, 16)),
        ("pp=2,schedule=zbv", 2, (16, 18, 20, 18)),
        ("pp=2,schedule=interleaved", 2, (14, 14, 14, 14)),
        ("pp=4,tp=2", 8, (18, 21, 21, 20)),
    ],
    ids=str,
)
def test_few_blocks_tell_what_many_hold_in_other_layouts(layout: str, ranks: int, blocks: tuple[int, ...]) -> None:
    the_same(layout, *blocks, ranks=ranks)


@pytest.mark.soak
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", ["zero1", "fsdp", "ddp,remat=full"])
@pytest.mark.parametrize("family", ["gpt2", "bert", "nano", "mixtral"])
def test_few_blocks_tell_what_many_of_other_models_hold(family: str, layout: str, device: str) -> None:
    more: dict[str, Any] = {"experts": 4} if family == "mixtral" else {}
    the_same(layout, 14, ranks=2, family=family, device=device, **more)


class Chained(nn.Module):
    """Blocks of equal weights, of which `kind` makes some do another thing, or more the deeper they stand."""

    def __init__(self, kind: str, depth: int = 12) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: Any) -> Any:
        seen, first = x, x
        for place, layer in enumerate(self.layers):
            if self.kind == "some without gradients" and place < 3:
                with torch.no_grad():
                    x = layer(x)
                continue
            if self.kind == "more at each":
                seen = torch.cat([seen, x], 1)
                x = x + seen.mean(1, keepdim=True)
            late = self.kind == "another late" and place > 6
            x = x + (torch.relu(layer(x)) if late else torch.tanh(layer(x)))
            if self.kind == "half of the time" and place % 2:
                x = torch.nn.functional.dropout(x, 0.1)
            if self.kind == "a skip over all" and place == len(self.layers) - 1:
                x = x + first
        return x


def chained(kind: str) -> tuple[pl.Job, Settings]:
    rows = torch.utils.data.TensorDataset(torch.randn(32, 8, 32), torch.zeros(32))
    job = pl.Job(
        model=lambda: Chained(kind), train_data=rows, global_batch_size=4,
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
    )  # fmt: skip
    return build_once(job, seed=0), Settings()


@pytest.mark.parametrize("kind", ["all alike", "a skip over all"])
def test_blocks_that_are_alike_tell_of_all(kind: str) -> None:
    assert deep.are_blocks_representative(*chained(kind))


@pytest.mark.parametrize("kind", ["some without gradients", "more at each", "another late", "half of the time"])
def test_blocks_that_differ_by_their_place_do_not_tell_of_all(kind: str) -> None:
    assert not deep.are_blocks_representative(*chained(kind))


def replays(monkeypatch: pytest.MonkeyPatch, ready: PreparedJob, blocks: tuple[int, ...]) -> int:
    """How many there are of a job whose few blocks do tell of all."""
    monkeypatch.setattr(deep, "are_blocks_representative", lambda *_: True)
    seen: list[ExecutionPlan] = []

    def counted(job: Any, settings: Any, plan: ExecutionPlan, **more: Any) -> list[Any]:
        seen.append(plan)
        return replay(job, settings, plan, **more)

    monkeypatch.setattr(deep, "replay", counted)
    deep.DepthExtrapolation(ready.job, ready.settings).replay(ready.settings, ready.plan, blocks)
    return len(seen)


def test_what_few_blocks_do_not_tell_is_replayed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks share their buffers with others, and a model of two chains grows in two places."""
    small = ready_for("llama", "zero1", ranks=2, device="cuda", width=64, heads=4, length=16, depth=14)
    assert replays(monkeypatch, small, (14,)) == 1
    two = ready_for("t5", "single", ranks=1, device="cuda", width=2048, heads=16, length=16, depth=14)
    assert replays(monkeypatch, two, (28,)) == 1


def test_every_nth_block_again_is_replayed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four or five blocks none or one is of such a kind, of all of them a part."""
    for remat, times in (("every:5", 1), ("full", 2)):
        ready = ready_for("llama", f"ddp,remat={remat}", ranks=2, device="cuda", **WIDE, depth=14)
        monkeypatch.undo()
        assert replays(monkeypatch, ready, (14,)) == times


@pytest.mark.parametrize("fails", [False, True], ids=["says no", "fails"])
def test_whether_few_blocks_tell_is_asked_once(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    ready = ready_for("llama", "single", ranks=1, device="cuda", **WIDE, depth=14)
    asked: list[pl.Job] = []

    def no(job: pl.Job, settings: Settings) -> bool:
        asked.append(job)
        if fails:
            raise ValueError("the job's own")
        return False

    monkeypatch.setattr(deep, "are_blocks_representative", no)
    monkeypatch.setattr(deep, "replay", lambda job, *_: [job.model])
    chain = deep.DepthExtrapolation(ready.job, ready.settings)
    assert chain.count_replayed_blocks(ready.settings, ready.plan, (14,)) == 14
    assert chain.replay(ready.settings, ready.plan, (14,)) == [ready.job.model]
    assert asked == [ready.job]


def test_want_of_memory_is_not_taken_for_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = ready_for("llama", "single", ranks=1, device="cuda", **WIDE, depth=14)

    def short(*_: Any) -> bool:
        raise RuntimeError("[enforce fail] can't allocate memory: you tried to allocate 1048576 bytes")

    monkeypatch.setattr(deep, "are_blocks_representative", short)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        deep.DepthExtrapolation(ready.job, ready.settings).replay(ready.settings, ready.plan, (14,))


def test_weights_that_are_not_trained_do_not_travel_alone() -> None:
    class Frozen(nn.Module):
        def __init__(self, trains: bool) -> None:
            super().__init__()
            self.base = nn.Linear(2048, 2560).requires_grad_(trains)
            self.own = nn.Linear(8, 8)

    def largest(trains: bool) -> int:
        model = nn.Sequential(*(Frozen(trains) for _ in range(14)))
        return deep.DepthExtrapolation(
            replace(chained("all alike")[0], model=lambda: model), Settings()
        ).largest_tensor_per_block

    assert largest(True) == 2048 * 2560
    assert largest(False) == 64
