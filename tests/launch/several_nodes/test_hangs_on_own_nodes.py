"""A rank that holds up the ranks of other nodes: named within seconds, wherever it runs."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.failures.hang_watch import read_hangs
from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import OwnNodes, rank_pid, wait_for_step
from tests.waiting import wait_until


def stuck_nodes(shop: Shop, *words: str) -> OwnNodes:
    settings = ("--run-dir", "many", "--ranks-per-node", "2", "--train.steps", "300", "--train.threads", "1")
    return OwnNodes(shop, 2, (*settings, "--watch.to", "jsonl", *words))


def first_hang(run: Path) -> dict[str, Any]:
    wait_until(lambda: bool(read_hangs(run / "logs/attempt-1")), seconds=60)
    return read_hangs(run / "logs/attempt-1")[0]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_hanging_rank_is_named_with_its_line_on_any_node(shop: Shop, rank: int) -> None:
    nodes = stuck_nodes(shop, "--faults", f"hang rank={rank} step=8")
    nodes.start_all()
    run = shop.path / "many"
    record = first_hang(run)
    waiting = [other for other in range(4) if other != rank]
    assert (record["ranks"], record["waiting"]) == ([rank], waiting), record
    assert record["seconds"] < 10 and "faults.py" in record["line"], record
    place = "" if rank == 0 else " on "
    assert f"rank {rank} is holding up step 8" in record["message"] and f"  rank {rank}{place}" in record["message"]
    said = shop.run("why", "many", "--json").json()
    assert said["state"] == "hanging" and said["hang"]["ranks"] == [rank], said
    assert len(said["ranks"]) == 4
    os.kill(nodes.processes[0].pid, signal.SIGKILL)
    assert nodes.end(1).code == 75


def test_a_stopped_rank_on_another_node_is_named_until_it_continues(shop: Shop) -> None:
    nodes = stuck_nodes(shop)
    nodes.start_all(environ={"PAUSE": "0.02"})
    run = shop.path / "many"
    wait_for_step(run, 5, rank=2)
    pid = rank_pid(run, 2)
    os.kill(pid, signal.SIGSTOP)
    record = first_hang(run)
    assert (record["kind"], record["ranks"]) == ("stopped", [2]) and f": kill -CONT {pid}" in record["hint"], record
    os.kill(pid, signal.SIGCONT)
    time.sleep(3)
    os.kill(nodes.processes[0].pid, signal.SIGTERM)
    ends = nodes.ends()
    assert [end.code for end in ends] == [75, 75], [end.screen for end in ends]
    assert "rank 2 continues" in ends[0].err, ends[0].screen


def test_nothing_is_named_while_a_slow_rank_advances(shop: Shop) -> None:
    nodes = stuck_nodes(shop, "--train.steps", "6")
    nodes.start_all(environ={"PAUSE": "1.2"})
    assert [end.code for end in nodes.ends()] == [0, 0]
    assert not (shop.path / "many/logs/attempt-1/hangs.jsonl").exists()
