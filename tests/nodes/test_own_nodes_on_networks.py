"""A training on several real networks that Paceline starts itself: silence, crashes and name traps."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.commands.why import explain_run
from paceline.reporting.run_report import run_page
from paceline.run_folder.run_folder import RunFolder
from tests.conftest import SMALL_JOB
from tests.launch.several_nodes.own_nodes import NodeEnd, wait_for_step
from tests.nodes.network_nodes import NetworkNodes, can_make_nodes, network_nodes

pytestmark = [
    pytest.mark.one_worker,
    pytest.mark.skipif(
        not can_make_nodes(), reason="network namespaces need root: test_training_on_own_nodes.py uses loopback"
    ),
]
EXACT = ("--train.exact", "true", "--checkpoint.every", "1")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkNodes]:
    folder = tmp_path_factory.mktemp("own")
    (folder / "job.py").write_text(SMALL_JOB)
    with network_nodes(3, folder) as made:
        yield made


def start(
    nodes: NetworkNodes, node: int, run: Path, *words: str, port: int, steps: int, hosts: str = "", pause: float = 0.02
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--run-dir", str(run)]
    command += ["--nodes", f"3:node0:{port}", "--node", str(node), "--train.steps", str(steps), *words]
    environ = {"CUDA_VISIBLE_DEVICES": "", "PAUSE": str(pause)}
    return nodes.start(node, command, environ=environ, hosts=hosts)


def start_all(nodes: NetworkNodes, run: Path, *words: str, port: int, steps: int) -> "list[subprocess.Popen[str]]":
    return [start(nodes, node, run, *words, port=port, steps=steps) for node in range(3)]


def end(process: "subprocess.Popen[str]") -> NodeEnd:
    out, err = process.communicate(timeout=120)
    return NodeEnd(process.returncode, out, err)


def digest(run: Path) -> str:
    return str(json.loads((run / "weights.json").read_text())["digest"])


@pytest.fixture(scope="module")
def undisturbed(nodes: NetworkNodes, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of 60 steps in exact mode, on three ranks of one machine."""
    run = tmp_path_factory.mktemp("one") / "run"
    words = ["train", "job.py", "--ranks", "3", "--run-dir", str(run), "--train.steps", "60", *EXACT]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "paceline", *words],
        cwd=nodes.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return digest(run)


def test_own_names_that_resolve_to_127_0_1_1_do_no_harm(nodes: NetworkNodes, tmp_path: Path, undisturbed: str) -> None:
    run = tmp_path / "run"
    processes = []
    for node in range(3):
        others = "".join(f"{nodes.address(other)} node{other}\n" for other in range(3) if other != node)
        hosts = f"127.0.0.1 localhost\n127.0.1.1 node{node}\n{others}"
        if node == 0:
            hosts = f"127.0.0.1 localhost\n{nodes.address(0)} node0\n{others}"
        processes.append(start(nodes, node, run, *EXACT, port=29701, steps=60, hosts=hosts, pause=0))
    ends = [end(process) for process in processes]
    assert [each.code for each in ends] == [0, 0, 0], [each.screen for each in ends]
    assert digest(run) == undisturbed


def test_a_silence_that_is_shorter_than_the_patience_does_no_harm(
    nodes: NetworkNodes, tmp_path: Path, undisturbed: str
) -> None:
    run = tmp_path / "run"
    processes = start_all(nodes, run, *EXACT, "--nodes.patience", "60", port=29702, steps=60)
    wait_for_step(run, 5)
    nodes.cut(1)
    time.sleep(3)
    nodes.mend(1)
    ends = [end(process) for process in processes]
    assert [each.code for each in ends] == [0, 0, 0], [each.screen for each in ends]
    assert digest(run) == undisturbed and not (run / "logs/attempt-2").exists()


def test_a_broken_link_between_two_other_nodes_is_named_by_the_head(nodes: NetworkNodes, tmp_path: Path) -> None:
    run, route = tmp_path / "run", ("blackhole", f"{nodes.address(2)}/32")
    words = (*EXACT, "--survive.restarts", "1", "--train.timeout_seconds", "10")
    processes = start_all(nodes, run, *words, port=29709, steps=5000)
    wait_for_step(run, 5)
    nodes.run_inside(1, "ip", "route", "add", *route)
    try:
        ends = [end(process) for process in processes]
    finally:
        nodes.run_inside(1, "ip", "route", "del", *route)
    assert [each.code for each in ends] == [1, 1, 1], [each.screen for each in ends]
    says = r"the link between node 1 \(node1, rank 1\) and node 2 \(node2, rank 2\) does not work: (Invalid|timed out)"
    assert len(re.findall(says, ends[0].screen)) == 2, ends[0].screen  # before the restart, and at the end
    assert "link between node 0" not in ends[0].screen
    explanation = explain_run(str(run))
    assert re.search(rf"attempt 1: {says}", explanation.restarts[0]), explanation.text
    assert re.search(rf"  {says}.*; paceline doctor", explanation.text), explanation.text
    assert len(re.findall(says, run_page(RunFolder(run)))) == 3  # both failures, and the line of `why` about the first


def test_a_node_whose_network_is_cut_is_named_by_all_and_nothing_is_left(nodes: NetworkNodes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    processes = start_all(nodes, run, *EXACT, "--nodes.patience", "3", port=29703, steps=5000)
    wait_for_step(run, 5)
    nodes.cut(2)
    try:
        ends = [end(process) for process in processes]
    finally:
        nodes.mend(2)
    assert [each.code for each in ends] == [75, 75, 75], [each.screen for each in ends]
    for each in ends[:2]:
        assert "node 2 (node2, rank 2) is gone: nothing for 3 s; last step" in each.screen, each.screen
    assert "node 0 (node0) is gone: nothing for 3 s" in ends[2].screen, ends[2].screen
    assert [nodes.pids(node) for node in range(3)] == [[], [], []]


def test_a_node_that_crashes_and_comes_again_costs_no_bit(
    nodes: NetworkNodes, tmp_path: Path, undisturbed: str
) -> None:
    run = tmp_path / "run"
    words = (*EXACT, "--nodes.restarts", "3")
    processes = start_all(nodes, run, *words, port=29704, steps=60)
    wait_for_step(run, 5)
    nodes.kill(2)
    end(processes[2])
    processes[2] = start(nodes, 2, run, *words, port=29704, steps=60)
    wait_for_step(run, 10, attempt=2)
    nodes.kill(1)
    end(processes[1])
    processes[1] = start(nodes, 1, run, *words, port=29704, steps=60)
    ends = [end(process) for process in processes]
    assert [each.code for each in ends] == [0, 0, 0], [each.screen for each in ends]
    assert digest(run) == undisturbed
    assert "node 2 (node2, rank 2) is gone" in ends[0].screen and "(restart 2 of 3)" in ends[0].screen
