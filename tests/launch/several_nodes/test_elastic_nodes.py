"""A training on own nodes whose number changes while it runs: the same weights, and no step trained twice."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import OwnNodes, wait_for_step

STEPS = 60
WORDS = (
    "--run-dir", "many", "--train.steps", str(STEPS), "--train.exact", "true", "--watch.to", "console,jsonl",
    "--nodes.last_call", "1", "--log.every", "1",
)  # fmt: skip


def elastic_nodes(shop: Shop, *words: str, least: int = 2, count: int = 3) -> OwnNodes:
    return OwnNodes(shop, count, (*WORDS, *words), least=least)


def trained_steps(run: Path) -> list[int]:
    """The steps in the order in which the run trained them."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "StepDone"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_nodes_come_and_go_without_a_lost_step(shop: Shop, layout: str) -> None:
    nodes = elastic_nodes(shop, "--layout", layout)
    run = shop.path / "many"
    for node in (0, 1):
        nodes.start(node, environ={"PAUSE": "0.03"})
    wait_for_step(run, 3)
    nodes.start(2, environ={"PAUSE": "0.03"})
    wait_for_step(run, 8, attempt=2, rank=2)
    os.kill(nodes.processes[2].pid, signal.SIGTERM)
    left = nodes.end(2)
    ends = [nodes.end(node) for node in (0, 1)]
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert left.code == 75 and "node 2: asked to stop" in left.screen, left.screen
    assert ") has come; saving, then continuing on 3 nodes" in ends[0].err, ends[0].screen
    assert "rank 2) was asked to stop; saving, then continuing without it" in ends[0].err, ends[0].screen
    assert "continuing on 2 of 3 nodes, with 2 ranks" in ends[0].err, ends[0].screen
    assert (run / "logs/attempt-3").is_dir() and not (run / "logs/attempt-4").exists()
    assert trained_steps(run) == list(range(1, STEPS + 1))
    told = shop.run("why", "many").out.splitlines()[1:]
    host = r"\([^ ,]+"
    assert len(told) == 2, told
    came = rf"  attempt 1: node 2 {host}, rank 2\) came at step \d+ after \d+\.\d s; "
    assert re.fullmatch(rf"{came}continued on 3 nodes and 3 ranks, with node 2 {host}\)", told[0]), told
    went = rf"  attempt 2: node 2 {host}, rank 2\) left \(.*asked to stop\) at step \d+ after \d+\.\d s; "
    assert re.fullmatch(rf"{went}continued on 2 nodes and 2 ranks, without node 2 {host}\)", told[1]), told
    assert shop.train("one", "--train.exact", "true", "--layout", layout, ranks=2, steps=STEPS).code == 0
    assert shop.digest("many") == shop.digest("one")


def test_a_killed_node_is_replaced_by_none_and_the_layout_says_how_many_train(shop: Shop) -> None:
    """With pp=2 and one rank on a node, 4 and 2 nodes can train: the third one waits."""
    nodes = elastic_nodes(
        shop, "--layout", "pp=2,dp_shard=-1", "--checkpoint.every", "2", "--nodes.restarts", "3", count=4
    )
    run = shop.path / "many"
    for node in range(4):
        nodes.start(node, environ={"PAUSE": "0.03"})
    wait_for_step(run, 5, rank=3)
    os.kill(nodes.processes[2].pid, signal.SIGKILL)
    nodes.processes[2].communicate(timeout=60)
    ends = [nodes.end(node) for node in (0, 1, 3)]
    assert [end.code for end in ends] == [0, 0, 0], [end.screen for end in ends]
    assert "node 2 (" in ends[0].err and "continuing on 2 of 4 nodes, with 2 ranks" in ends[0].err, ends[0].screen
    told = shop.run("why", "many").out
    assert re.search(r"attempt 1: node 2 .* is gone: .*; restarted in .*; continued on 2 nodes and 2 ranks, ", told), (
        told
    )
    words = ("--train.exact", "true", "--layout", "pp=2,dp_shard=-1")
    assert shop.train("one", *words, ranks=4, steps=STEPS).code == 0
    assert shop.digest("many") == shop.digest("one")


def test_the_last_nodes_that_are_needed_are_waited_for(shop: Shop) -> None:
    """Node 1 of two is asked to stop, and comes again."""
    nodes = elastic_nodes(shop)
    run = shop.path / "many"
    for node in (0, 1):
        nodes.start(node, environ={"PAUSE": "0.03"})
    wait_for_step(run, 3)
    os.kill(nodes.processes[1].pid, signal.SIGTERM)
    assert nodes.end(1).code == 75
    nodes.start(1, environ={"PAUSE": "0.03"})
    ends = [nodes.end(node) for node in (0, 1)]
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert trained_steps(run) == list(range(1, STEPS + 1))


def test_too_few_nodes_end_the_run_which_can_be_started_again(shop: Shop) -> None:
    nodes = elastic_nodes(shop, "--nodes.wait", "1")
    for node in (0, 1):
        nodes.start(node, environ={"PAUSE": "0.03"})
    wait_for_step(shop.path / "many", 3)
    os.kill(nodes.processes[1].pid, signal.SIGTERM)
    ends = [nodes.end(node) for node in (0, 1)]
    assert [end.code for end in ends] == [75, 75], [end.screen for end in ends]
    said = "Not restarted: another node (1 of at least 2 are here) did not come within 1 s."
    assert said in ends[0].screen and f"--nodes {nodes.option}" in ends[0].screen, ends[0].screen


def test_a_stop_of_node_0_stops_the_run_and_its_command_resumes_it(shop: Shop) -> None:
    nodes = elastic_nodes(shop, count=4)
    for node in (0, 1):
        nodes.start(node, environ={"PAUSE": "0.03"})
    wait_for_step(shop.path / "many", 3)
    os.kill(nodes.processes[0].pid, signal.SIGTERM)
    ends = [nodes.end(node) for node in (0, 1)]
    assert [end.code for end in ends] == [75, 75], [end.screen for end in ends]
    assert f"--nodes {nodes.option} --ranks-per-node 1" in ends[0].screen, ends[0].screen


@pytest.mark.parametrize(("words", "says"), [
    (("--layout", "pp=4"), "--layout pp=4 fits no smaller number of ranks down to 2"),
    (("--update", "local,every=4", "--train.exact", "false"), "can't continue with fewer ranks"),
])  # fmt: skip
def test_what_can_not_change_its_size_is_refused(shop: Shop, words: tuple[str, ...], says: str) -> None:
    nodes = elastic_nodes(shop, *words, count=4)
    nodes.start(0)
    end = nodes.end(0)
    assert end.code == 2 and says in end.screen and "--nodes 4:127.0.0.1" in end.screen, end.screen


def test_a_number_of_nodes_that_the_job_refuses_is_not_tried_again(shop: Shop) -> None:
    """Three microbatches of the start do not fit the microbatch size of the next number of nodes."""
    nodes = elastic_nodes(shop, "--train.gradient_accumulation_steps", "3", least=1, count=2)
    nodes.start(0, environ={"PAUSE": "0.03"})
    wait_for_step(shop.path / "many", 3)
    nodes.start(1, environ={"PAUSE": "0.03"})
    ends = [nodes.end(node) for node in (0, 1)]
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    said = "this number of nodes does not fit the job, so it is not tried again"
    assert said in ends[0].err and "continuing on 1 of 2 nodes" in ends[0].err, ends[0].screen
    assert trained_steps(shop.path / "many") == list(range(1, STEPS + 1))
