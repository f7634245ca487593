"""A deep model's replay by few blocks against the whole one: the same bytes, kind by kind."""

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.memory.measured import Setting

from paceline.plan.settle import Plan
from paceline.spec.settings import Settings
from paceline.train import deep
from paceline.train.ready import Ready, prepare
from paceline.train.replay import replay
from paceline.train.shallow import built_once
from paceline.verbs.running import Common, make_task

WIDE: dict[str, Any] = {"width": 2048, "heads": 16, "length": 64, "vocabulary": 256}


def ready_for(family: str, layout: str, *, ranks: int, device: str, **job: Any) -> Ready:
    setting = Setting(family=family, layout=layout, ranks=ranks, batch=16, micro=2, job=job)
    common = Common(ranks=ranks, layout=layout, device="cpu", quiet=True)
    ready = prepare(make_task("compare", f"benchmarks.memory.jobs:{family}", common, setting.overrides))
    plan = ready.plan if device == "cpu" else replace(ready.plan, device=device, backend="nccl")
    return replace(ready, job=built_once(ready.job, seed=0), plan=plan)


def cut(settings: Settings, blocks: tuple[int, ...]) -> Settings:
    return replace(settings, place=replace(settings.place, stages=blocks if len(blocks) > 1 else ()))


def the_same(
    layout: str, *blocks: int, ranks: int = 1, family: str = "llama", device: str = "cuda", **job: Any
) -> None:
    ready = ready_for(family, layout, ranks=ranks, device=device, **{**WIDE, "depth": sum(blocks), **job})
    settings = cut(ready.settings, blocks)
    assert 0 < deep.blocks_replayed(settings, ready.plan, blocks) < sum(blocks)
    way = deep._way(settings, ready.plan, blocks)
    assert way is not None
    found = deep._carried_on(ready.job, settings, ready.plan, blocks, way)
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


def whole(monkeypatch: pytest.MonkeyPatch, ready: Ready, settings: Settings, blocks: tuple[int, ...]) -> bool:
    """Whether all of the model is replayed at once."""
    seen: list[Plan] = []

    def counted(job: Any, settings: Any, plan: Plan, **more: Any) -> list[Any]:
        seen.append(plan)
        return replay(job, settings, plan, **more)

    monkeypatch.setattr(deep, "replay", counted)
    deep.replay_deep(ready.job, settings, ready.plan, blocks=blocks)
    return len(seen) == 1


def test_what_few_blocks_do_not_tell_is_replayed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks share their buffers with others, and a model of two chains grows in two places."""
    small = ready_for("llama", "zero1", ranks=2, device="cuda", width=64, heads=4, length=16, depth=14)
    assert whole(monkeypatch, small, small.settings, (14,))
    few = ready_for("llama", "single", ranks=1, device="cuda", **WIDE, depth=6)
    assert whole(monkeypatch, few, few.settings, (6,))
    two = ready_for("t5", "single", ranks=1, device="cuda", width=2048, heads=16, length=16, depth=14)
    assert whole(monkeypatch, two, two.settings, (28,))
