"""Checkpoints in memory: when they are written, what a restart takes, and what happens if they can't be written."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.errors import SaveError
from paceline.events import Note
from paceline.trainer.saving.memory.memory_folder import MemoryFolder
from paceline.trainer.saving.memory.memory_tier import MemoryTier, open_memory_tier
from paceline.trainer.saving.memory.open_memory import open_memory


class Writer:
    """Stands in for the checkpointer: it only takes time."""

    def __init__(self, clock: "Clock", *, seconds: float) -> None:
        self.steps: list[int] = []
        self._clock = clock
        self._seconds = seconds
        self.error: Exception | None = None

    def write(self, write: object, *, cursor: Any, loader: object, progress: object) -> None:
        if self.error is not None:
            raise self.error
        self._clock.now += self._seconds
        self.steps.append(cursor.step)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def setup_of(
    *, synchronous: bool = True, memory_every: int | None = None, background: bool = False, elements: int = 1000
) -> Any:
    return SimpleNamespace(
        world=World.alone(),
        named_parameters=[SimpleNamespace(parameter=torch.zeros(elements))],
        settings=SimpleNamespace(checkpoint=SimpleNamespace(memory_every=memory_every, background=background)),
        plan=SimpleNamespace(update_rule=SimpleNamespace(is_synchronous=synchronous)),
    )


def tier_of(
    writer: Writer,
    folder: Path,
    *,
    every: int | None,
    start_step: int = 0,
    elements: int = 1000,
    background_seconds: float = 0.0,
) -> MemoryTier:
    setup = setup_of(elements=elements)
    memory = MemoryFolder(folder, world=World.alone(), keeps_checkpoints=True)
    memory.background_seconds = background_seconds
    return MemoryTier(setup=setup, checkpointer=writer, memory=memory, every=every, start_step=start_step)  # type: ignore[arg-type]


def run_steps(tier: MemoryTier, clock: Clock, *, steps: range, seconds: float) -> list[Any]:
    events: list[Any] = []
    for step in steps:
        clock.now += seconds
        if step >= tier.next_step:
            events += tier.save(cursor=SimpleNamespace(step=step), loader=None, progress={})  # type: ignore[arg-type]
    return events


def test_an_interval_of_the_user_is_kept(clock: Clock, tmp_path: Path) -> None:
    writer = Writer(clock, seconds=0.5)
    run_steps(tier_of(writer, tmp_path, every=3, start_step=4), clock, steps=range(5, 17), seconds=0.01)
    assert writer.steps == [6, 9, 12, 15]


@pytest.mark.parametrize(("save_seconds", "step_seconds"), [(0.004, 0.5), (0.02, 0.5), (0.02, 0.01), (1.0, 0.5)])
def test_the_derived_interval_costs_at_most_a_hundredth(
    clock: Clock, tmp_path: Path, save_seconds: float, step_seconds: float
) -> None:
    writer = Writer(clock, seconds=save_seconds)
    run_steps(tier_of(writer, tmp_path, every=None), clock, steps=range(1, 3001), seconds=step_seconds)
    cost = len(writer.steps) * save_seconds
    assert 0.004 * 3000 * step_seconds < cost <= 0.0101 * 3000 * step_seconds + save_seconds, writer.steps
    if save_seconds < 0.01 * step_seconds:
        assert writer.steps[-1] - writer.steps[-2] == 1, "cheap enough for each step"


def test_the_time_of_the_other_thread_counts_too(clock: Clock, tmp_path: Path) -> None:
    writer = Writer(clock, seconds=0.01)
    tier = tier_of(writer, tmp_path, every=None, background_seconds=0.03)
    run_steps(tier, clock, steps=range(1, 2001), seconds=0.5)
    assert writer.steps[-1] - writer.steps[-2] == 8, "0.04 s are a hundredth of 8 steps"


def test_a_large_model_waits_longer_for_its_first_save(clock: Clock, tmp_path: Path) -> None:
    firsts = []
    for name, elements in (("small", 1000), ("large", 50_000_000)):
        (tmp_path / name).mkdir()
        writer = Writer(clock, seconds=0.01)
        tier = tier_of(writer, tmp_path / name, every=None, elements=elements)
        run_steps(tier, clock, steps=range(1, 1001), seconds=0.5)
        firsts.append(writer.steps[0])
    assert firsts[0] == 21 and 200 < firsts[1] < 400


def test_a_save_that_fails_turns_the_tier_off_and_the_run_goes_on(clock: Clock, tmp_path: Path) -> None:
    writer = Writer(clock, seconds=0.01)
    writer.error = SaveError("a checkpoint needs 1.2 GiB, but 60 MiB are free.")
    tier = tier_of(writer, tmp_path, every=2)
    (note,) = run_steps(tier, clock, steps=range(1, 20), seconds=0.01)
    assert isinstance(note, Note) and "60 MiB are free. A restart uses the newest checkpoint that is left" in note.text


def test_which_runs_have_one(tmp_path: Path) -> None:
    task = Task(verb="train", job="job.py", memory_folder=str(tmp_path))

    def has_one(setup: Any, task: Task = task) -> bool:
        checkpointer: Any = SimpleNamespace(memory=open_memory(setup, task))
        return open_memory_tier(setup, checkpointer, start_step=0) is not None

    assert has_one(setup_of()) and has_one(setup_of(memory_every=5))
    assert not has_one(setup_of(memory_every=0))
    assert not has_one(setup_of(synchronous=False))
    assert not has_one(setup_of(), Task(verb="train", job="job.py"))
    only_to_copy = setup_of(memory_every=0, background=True)
    assert not has_one(only_to_copy) and open_memory(only_to_copy, task) is not None
    assert open_memory(setup_of(memory_every=0), task) is None
