"""Simulated ranks: what they send, what their sums are, and that none waits for a stage that failed."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.comm.rank_threads import PeerFailed
from paceline.measured_planning.simulated_ranks import SimulatedRanks, SimulatedWorld
from paceline.planner.layout.mesh import Mesh
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.torch_internals.dispatch_modes import fake_process_group

WAIT_SECONDS = 20.0


@pytest.fixture
def scene() -> Iterator[SimulatedRanks]:
    """Two stages of three ranks each."""
    mesh = Mesh(pp=2, dp_shard=3)
    with fake_process_group(mesh.ranks):
        yield SimulatedRanks(mesh=mesh)


def on_stages(scene: SimulatedRanks, run: Callable[[SimulatedWorld], Any]) -> list[Any]:
    """What each stage finds, or what it raised."""
    found: dict[int, Any] = {}

    def stage(number: int) -> None:
        with scene.run_lock:
            try:
                found[number] = run(scene.world(number, backend="gloo"))
            except BaseException as error:
                found[number] = error
                scene.abort()

    threads = [threading.Thread(target=stage, args=(number,), daemon=True) for number in range(scene.mesh.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    return [found[number] for number in range(scene.mesh.pp)]


def test_each_stage_is_its_first_rank(scene: SimulatedRanks) -> None:
    assert on_stages(scene, lambda world: (world.rank, world.world_size)) == [(0, 6), (3, 6)]


def test_of_a_value_the_ranks_of_a_stage_say_the_same(scene: SimulatedRanks) -> None:
    found = on_stages(scene, lambda world: world.gather_json({"of": world.stage}))
    assert found[0] == found[1] == [{"of": 0}] * 3 + [{"of": 1}] * 3


def test_sums_are_over_all_ranks_of_all_stages(scene: SimulatedRanks) -> None:
    found = on_stages(scene, lambda world: world.all_reduce(torch.tensor([1.0 + world.stage])).item())
    assert found == [3 * 1.0 + 3 * 2.0] * 2


@pytest.mark.parametrize(("op", "expected"), [("max", 2.0), ("min", 1.0)])
def test_the_most_and_the_least_are_not_multiplied(scene: SimulatedRanks, op: Any, expected: float) -> None:
    found = on_stages(scene, lambda world: world.all_reduce(torch.tensor([1.0 + world.stage]), op=op).item())
    assert found == [expected] * 2


def test_alone_in_its_stage_a_rank_adds_up_what_it_has(scene: SimulatedRanks) -> None:
    def run(world: SimulatedWorld) -> Any:
        mine = world.subgroup([[0, 1, 2], [3, 4, 5]])
        wait = mine.start_all_reduce(value := torch.tensor([2.0 + world.stage]))
        wait()
        return mine.rank, mine.world_size, value.item(), mine.gather_json(world.stage)

    assert on_stages(scene, run) == [(0, 3, 6.0, [0, 0, 0]), (0, 3, 9.0, [1, 1, 1])]


def test_along_the_stages_one_of_each_stands(scene: SimulatedRanks) -> None:
    def run(world: SimulatedWorld) -> Any:
        column = world.subgroup([[0, 3], [1, 4], [2, 5]])
        return column.rank, column.world_size, column.gather_json(world.stage), column.share_json(world.stage, source=1)

    assert on_stages(scene, run) == [(0, 2, [0, 1], 1), (1, 2, [0, 1], 1)]


def test_a_part_of_all_is_everybody(scene: SimulatedRanks) -> None:
    assert on_stages(scene, lambda world: world.subgroup([range(6)]) is world) == [True, True]


def test_broadcast_brings_what_the_source_stage_has(scene: SimulatedRanks) -> None:
    found = on_stages(scene, lambda world: world.broadcast(torch.tensor([world.stage + 5]), source=4).item())
    assert found == [6, 6]


def test_a_message_brings_what_was_sent(scene: SimulatedRanks) -> None:
    def run(world: SimulatedWorld) -> Any:
        if world.stage == 0:
            sent = world.start_send(torch.arange(4.0), to=1, tag=7)
            sent.wait()
            return sent.is_completed()
        arrival = world.start_receive(into := torch.zeros(4), source=0, tag=7)
        arrival.wait()
        return into.tolist()

    assert on_stages(scene, run) == [False, [0.0, 1.0, 2.0, 3.0]]


def test_numbers_that_are_not_there_do_not_arrive_either(scene: SimulatedRanks) -> None:
    def run(world: SimulatedWorld) -> Any:
        with FakeExecutionMode(fake_storages=scene.fake_storages):
            if world.stage == 0:
                world.start_send((torch.ones(128, 128) * 2)[:8, :8], to=1, tag=1).wait()
                return None
            world.start_receive(into := torch.zeros(8, 8), source=0, tag=1).wait()
            return scene.fake_storages.has(into)

    assert on_stages(scene, run)[1] is True


@pytest.mark.parametrize("waits_for", ["a message", "a meeting"])
def test_a_failing_stage_lets_the_others_go_at_once(scene: SimulatedRanks, waits_for: str) -> None:
    def run(world: SimulatedWorld) -> Any:
        if world.stage == 1:
            raise ValueError("its own")
        if waits_for == "a meeting":
            return world.gather_json(1)
        return world.start_receive(torch.zeros(1), source=1, tag=0).wait()

    began = time.monotonic()
    first, second = on_stages(scene, run)
    assert isinstance(first, PeerFailed)
    assert str(second) == "its own"
    assert time.monotonic() - began < 5
