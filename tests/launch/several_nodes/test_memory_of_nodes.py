"""Checkpoints in the memory of several nodes: a lost node costs a few steps, and no read of the disk."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import NodeEnd, OwnNodes, wait_for_step

WORDS = (
    "--train.steps", "40", "--train.exact", "true", "--train.threads", "1", "--checkpoint.every", "1000",
    "--checkpoint.memory_every", "3", "--nodes.restarts", "2", "--ranks-per-node", "1",
)  # fmt: skip


def memory_folders(run: Path) -> list[Path]:
    """The memory folders of all nodes in all attempts of a run."""
    requests = [json.loads(path.read_text()) for path in run.glob("logs/attempt-*/request*.json")]
    return [Path(request["payload"]["memory_folder"]) for request in requests]


def nodes_of(shop: Shop, *words: str, count: int = 3, least: int | None = None) -> OwnNodes:
    return OwnNodes(shop, count, ("--run-dir", "many", *WORDS, *words), least=least)


def lose_and_replace(nodes: OwnNodes, node: int, *, step: int = 8) -> list[NodeEnd]:
    """Kill the agent of a node, start another one in its place, and return how all ended."""
    nodes.start_all(environ={"PAUSE": "0.05"})
    wait_for_step(nodes.shop.path / "many", step, rank=node)
    os.kill(nodes.processes[node].pid, signal.SIGKILL)
    nodes.processes[node].communicate(timeout=60)
    nodes.start(node, environ={"PAUSE": "0.05"})
    return nodes.ends()


def digest_of_one(shop: Shop, ranks: int, *words: str) -> str:
    done = shop.train("one", "--train.exact", "true", "--train.threads", "1", *words, ranks=ranks, steps=40)
    assert done.code == 0, done.err
    return shop.digest("one")


@pytest.mark.parametrize(("layout", "node"), [("ddp", 1), ("fsdp", 2)])
def test_a_lost_node_is_restored_from_the_copy_of_its_neighbour(shop: Shop, layout: str, node: int) -> None:
    ends = lose_and_replace(nodes_of(shop, "--layout", layout), node)
    assert [end.code for end in ends] == [0, 0, 0], [end.screen for end in ends]
    assert "(memory)" in ends[0].screen, ends[0].screen
    assert shop.digest("many") == digest_of_one(shop, 3, "--layout", layout)
    folders = memory_folders(shop.path / "many")
    assert len(set(folders)) == 4 and not [path for path in folders if path.exists()], folders


def test_a_killed_rank_is_restored_without_copies(shop: Shop) -> None:
    nodes = nodes_of(shop, "--checkpoint.peer_copies", "0", "--faults", "kill rank=1 step=9", count=2)
    nodes.start_all()
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "from step 6 (memory)" in ends[0].screen, ends[0].screen
    assert shop.digest("many") == digest_of_one(shop, 2)


def test_without_copies_a_lost_node_costs_all_steps_since_the_last_save_on_disk(shop: Shop) -> None:
    ends = lose_and_replace(nodes_of(shop, "--checkpoint.peer_copies", "0", count=2), 1)
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "(memory)" not in ends[0].screen, ends[0].screen
    assert shop.digest("many") == digest_of_one(shop, 2)


def test_no_node_uses_its_memory_if_one_has_none(shop: Shop) -> None:
    nodes = nodes_of(shop, "--checkpoint.every", "5", "--faults", "kill rank=0 step=9", count=2)
    (shop.path / "patch").mkdir()
    shop.write("patch/sitecustomize.py", "import paceline.launch.memory_disk as disk\ndisk.MEMORY_DISK /= 'none'\n")
    nodes.start(0)
    nodes.start(1, environ={"PYTHONPATH": str(shop.path / "patch")})
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "no checkpoints in memory, because node 1 has none" in ends[1].screen, ends[1].screen
    assert "from step 5 (disk)" in ends[0].screen, ends[0].screen
    assert shop.digest("many") == digest_of_one(shop, 2)


def test_fewer_nodes_continue_from_the_memory_of_those_that_are_left(shop: Shop) -> None:
    nodes = nodes_of(shop, "--nodes.last_call", "0", least=2)
    nodes.start_all(environ={"PAUSE": "0.05"})
    wait_for_step(shop.path / "many", 8, rank=1)
    os.kill(nodes.processes[1].pid, signal.SIGKILL)
    nodes.processes[1].communicate(timeout=60)
    ends = [nodes.end(node) for node in (0, 2)]
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "continuing on 2 of 3 nodes" in ends[0].screen and "(memory)" in ends[0].screen, ends[0].screen
    assert shop.digest("many") == digest_of_one(shop, 3)
