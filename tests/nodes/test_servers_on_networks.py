"""Parameter servers on a node of their own, and workers on three others, each with a real network."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB
from tests.launch.several_nodes.own_nodes import NodeEnd, wait_for_step
from tests.nodes.network_nodes import NetworkNodes, can_make_nodes, network_nodes
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.one_worker,
    pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root"),
]
COUNT, STEPS = 4, 60
WORDS = ("--job.samples", "48", "--train.threads", "1", "--train.steps", str(STEPS))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkNodes]:
    folder = tmp_path_factory.mktemp("servers")
    (folder / "job.py").write_text(SMALL_JOB)
    with network_nodes(COUNT, folder) as made:
        yield made


def start_all(
    nodes: NetworkNodes, run: Path, *words: str, port: int, pause: float = 0.02
) -> "list[subprocess.Popen[str]]":
    command = [sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--run-dir", str(run), *WORDS]
    command += ["--nodes", f"{COUNT}:node0:{port}", *words]
    environ = {"CUDA_VISIBLE_DEVICES": "", "PAUSE": str(pause)}
    return [nodes.start(node, [*command, "--node", str(node)], environ=environ) for node in range(COUNT)]


def end(process: "subprocess.Popen[str]") -> NodeEnd:
    out, err = process.communicate(timeout=120)
    return NodeEnd(process.returncode, out, err)


def on_one_machine(nodes: NetworkNodes, run: Path, *words: str) -> Path:
    command = [sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--run-dir", str(run), *WORDS]
    done = subprocess.run([*command, *words], cwd=nodes.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


def digest(run: Path) -> str:
    return str(json.loads((run / "weights.json").read_text())["digest"])


def events(run: Path, name: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == name]


def losses(run: Path) -> list[float]:
    """The loss of each evaluation."""
    return [float(line["metrics"]["loss"]) for line in events(run, "EvalDone")]  # type: ignore[index]


def test_one_of_three_workers_nodes_crashes_and_the_training_goes_on_to_the_end(
    nodes: NetworkNodes, tmp_path: Path
) -> None:
    run, rule = tmp_path / "run", ("--update", "ps,servers=2,staleness=4")
    processes = start_all(nodes, run, *rule, "--ranks-per-node", "2", port=29711)
    wait_for_step(run, 20)
    nodes.kill(2)
    ends = [end(process) for process in processes]
    assert [each.code for each in ends[:2] + ends[3:]] == [0, 0, 0] and ends[2].code, [each.screen for each in ends]
    assert "node 2 (node2, ranks 4-5) is gone: its agent has ended" in ends[0].err, ends[0].screen
    assert "the run continues with 4 workers" in ends[0].err, ends[0].screen
    assert "went on without node 2 (node2, ranks 4-5) from step" in ends[0].out, ends[0].screen
    assert any("node 2 (node2, ranks 4-5) is lost after step" in str(note["text"]) for note in events(run, "Note"))
    assert not (run / "logs/attempt-2").exists()
    assert [nodes.pids(node) for node in range(COUNT)] == [[]] * COUNT
    ours, theirs = losses(run), losses(on_one_machine(nodes, tmp_path / "one", *rule, "--ranks", "8"))
    assert len(ours) == len(theirs) and all(map(math.isfinite, ours))
    assert ours[-1] < ours[0] and abs(ours[-1] - theirs[-1]) < 0.1 * theirs[-1], (ours, theirs)


def test_a_silent_workers_node_costs_its_patience_and_no_bit(nodes: NetworkNodes, tmp_path: Path) -> None:
    """No connection is closed, and the timeout of the workers is ten minutes."""
    run, rule = tmp_path / "run", ("--update", "ps,staleness=0")
    processes = start_all(nodes, run, *rule, "--nodes.patience", "3", port=29712)
    wait_for_step(run, 20)
    nodes.cut(2)
    start_time = time.monotonic()
    try:
        ends = [end(process) for process in processes]
    finally:
        nodes.mend(2)
    assert time.monotonic() - start_time < 100
    assert [each.code for each in ends] == [0, 0, 75, 0], [each.screen for each in ends]
    assert "node 2 (node2, rank 2) is gone: nothing for 3 s; last step" in ends[0].err, ends[0].screen
    assert "node 0 (node0) is gone: nothing for 3 s" in ends[2].screen, ends[2].screen
    assert [nodes.pids(node) for node in range(COUNT)] == [[]] * COUNT
    assert digest(run) == digest(on_one_machine(nodes, tmp_path / "one", *rule, "--ranks", "4"))


def test_a_node_whose_network_is_mended_joins_again(nodes: NetworkNodes, tmp_path: Path) -> None:
    run, rule = tmp_path / "run", ("--update", "ps,staleness=0")
    words = (*rule, "--nodes.patience", "3", "--nodes.restarts", "1", "--train.steps", "200")
    processes = start_all(nodes, run, *words, port=29713, pause=0.1)
    wait_for_step(run, 20)
    nodes.cut(2)
    try:
        wait_until(lambda: list((run / "logs/attempt-1").glob("lost-work.json")) != [], seconds=30)
    finally:
        nodes.mend(2)
    ends = [end(process) for process in processes]
    assert [each.code for each in ends] == [0, 0, 0, 0], [each.screen for each in ends]
    assert "node 2 (node2, rank 2) takes the place of the lost one" in ends[0].err, ends[0].screen
    assert any(note["text"] == "the worker of rank 2 has restarted" for note in events(run, "Note"))
    one = on_one_machine(nodes, tmp_path / "one", *rule, "--ranks", "4", "--train.steps", "200")
    assert not (run / "logs/attempt-2").exists() and digest(run) == digest(one)
