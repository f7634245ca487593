"""A training on several nodes that Paceline starts itself: the same weights as on one machine, whatever is killed."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import OwnNodes, rank_pid, wait_for_step
from tests.waiting import wait_until

STEPS = 12
WORDS = ("--train.steps", str(STEPS), "--train.threads", "1", "--watch.to", "console,jsonl")


def nodes_of(shop: Shop, run: str, *words: str, count: int = 2) -> OwnNodes:
    return OwnNodes(shop, count, ("--run-dir", run, *WORDS, *words))


@pytest.mark.parametrize(
    ("layout", "count", "per_node"),
    [("ddp", 2, 1), ("fsdp", 2, 2), ("pp=2,dp_shard=2", 2, 2), ("zero2", 3, 1)],
)
def test_the_weights_are_those_of_one_machine(shop: Shop, layout: str, count: int, per_node: int) -> None:
    nodes = nodes_of(shop, "many", "--layout", layout, "--ranks-per-node", str(per_node), count=count)
    nodes.start_all()
    ends = nodes.ends()
    assert [end.code for end in ends] == [0] * count, [end.screen for end in ends]
    total = count * per_node
    one = shop.train("one", "--layout", layout, "--train.threads", "1", ranks=total, steps=STEPS)
    assert one.code == 0, one.err
    assert shop.digest("many") == shop.digest("one")
    assert f"starting {total} processes on {count} nodes" in ends[0].out
    first, last = per_node * (count - 1), total - 1
    ranks = f"rank {first}" if per_node == 1 else f"ranks {first}-{last}"
    assert f"node {count - 1} of {count}, with {ranks}; the screen of node 0" in ends[-1].out
    assert sorted(path.name for path in (shop.path / "many/logs/attempt-1").glob("rank-*.log")) == [
        f"rank-{rank}.log" for rank in range(total)
    ]


def test_a_rank_that_is_killed_on_another_node_restarts_the_run_on_all_nodes(shop: Shop) -> None:
    nodes = nodes_of(shop, "many", "--ranks-per-node", "2", "--checkpoint.every", "2", "--faults", "kill rank=3 step=5")
    nodes.start_all()
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "rank 3 on " in ends[0].out and "killed by SIGKILL at step 5" in ends[0].out, ends[0].screen
    assert "killed by SIGKILL at step 5; restarting (restart 1 of 3 without a new checkpoint)" in ends[0].err
    assert shop.train("one", "--train.threads", "1", ranks=4, steps=STEPS).code == 0
    assert shop.digest("many") == shop.digest("one")


def test_an_error_on_another_node_is_shown_by_the_head_with_its_line(shop: Shop) -> None:
    job = (shop.path / "job.py").read_text().replace(
        "    kept = batch[-1] != 3\n    return F",
        "    kept = batch[-1] != 3\n    if os.environ['RANK'] == '1': raise ValueError('only here')\n    return F",
    )  # fmt: skip
    shop.write("broken.py", job)
    nodes = nodes_of(shop, "many")
    for node in range(2):
        nodes.start(node, job="broken.py")
    ends = nodes.ends()
    assert [end.code for end in ends] == [1, 1], [end.screen for end in ends]
    assert "First error: rank 1 on " in ends[0].screen and "ValueError: only here" in ends[0].screen
    assert "broken.py:" in ends[0].screen and "FAILED" in ends[1].screen, ends[1].screen


def test_a_node_that_is_killed_ends_all_and_the_run_can_be_started_again(shop: Shop) -> None:
    nodes = nodes_of(shop, "many", "--ranks-per-node", "1", "--checkpoint.every", "1", "--train.steps", "400", count=3)
    nodes.start_all(environ={"PAUSE": "0.02"})
    run = shop.path / "many"
    wait_for_step(run, 5)
    pids = [rank_pid(run, rank) for rank in range(3)]
    os.kill(nodes.processes[1].pid, signal.SIGKILL)
    ends = nodes.ends()
    assert [end.code for end in ends] == [75, -9, 75], [end.screen for end in ends]
    for end in (ends[0], ends[2]):
        assert "node 1 (" in end.screen and "rank 1) is gone" in end.screen, end.screen
    assert f"on every node: paceline train job.py --run-dir many --nodes {nodes.option}" in ends[0].screen
    assert re.search(r"\n  it continues from step \d+ \(disk\): many/checkpoints/step-\d+\n", ends[0].screen)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=10)


def test_a_node_that_is_killed_and_started_again_continues_the_run(shop: Shop) -> None:
    words = ("--checkpoint.every", "1", "--nodes.restarts", "2", "--train.steps", "60", "--train.exact", "true")
    nodes = nodes_of(shop, "many", *words)
    nodes.start_all(environ={"PAUSE": "0.02"})
    run = shop.path / "many"
    wait_for_step(run, 5, rank=1)
    os.kill(nodes.processes[1].pid, signal.SIGKILL)
    nodes.processes[1].communicate(timeout=60)
    nodes.start(1)
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "waiting for a node in its place (restart 1 of 2)" in ends[0].err, ends[0].screen
    assert (run / "logs/attempt-2").is_dir()
    assert shop.train("one", "--train.exact", "true", ranks=2, steps=60).code == 0
    assert shop.digest("many") == shop.digest("one")


def test_the_head_may_be_killed_and_started_again_too(shop: Shop) -> None:
    words = ("--checkpoint.every", "1", "--nodes.restarts", "2", "--train.steps", "60", "--train.exact", "true")
    nodes = nodes_of(shop, "many", *words)
    nodes.start_all(environ={"PAUSE": "0.02"})
    run = shop.path / "many"
    wait_for_step(run, 5)
    os.kill(nodes.processes[0].pid, signal.SIGKILL)
    nodes.processes[0].communicate(timeout=60)
    nodes.start(0)
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "node 0 (" in ends[1].err and "waiting for it (restart 1 of 2)" in ends[1].err, ends[1].screen
    told = shop.run("why", "many").out
    lost = r"attempt 1: node 0 \([^ ]+, rank 0\) is gone: its agent has ended, .*; last step \d+; "
    assert re.search(rf"{lost}started again from step \d+ \(disk\) after \d+\.\d s\n", told), told
    assert shop.train("one", "--train.exact", "true", ranks=2, steps=60).code == 0
    assert shop.digest("many") == shop.digest("one")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_while_a_node_waits_for_the_lost_head_ends_with_75(shop: Shop, number: int) -> None:
    """As all other agents end, so that a scheduler starts the run again."""
    nodes = nodes_of(shop, "many", "--checkpoint.every", "1", "--nodes.restarts", "2", "--train.steps", "2000")
    nodes.start_all(environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "many", 5, rank=1)
    os.kill(nodes.processes[0].pid, signal.SIGKILL)
    nodes.processes[0].communicate(timeout=60)
    screen = nodes.processes[1].stderr
    assert screen is not None
    seen = ""
    while "waiting for it (restart 1 of 2)" not in seen:
        seen += (line := screen.readline())
        assert line, seen
    nodes.processes[1].send_signal(number)
    end = nodes.end(1)
    assert end.code == 75, end.screen
    assert "node 1: node 0 (" in end.screen and "asked to stop while waiting for it" in end.screen


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_signal_to_any_node_saves_and_stops_all(shop: Shop, node: int) -> None:
    nodes = nodes_of(shop, "many", "--train.steps", "500")
    nodes.start_all(environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "many", 5)
    nodes.processes[node].send_signal(signal.SIGTERM)
    ends = nodes.ends()
    assert [end.code for end in ends] == [75, 75], [end.screen for end in ends]
    assert "Stopped and saved. Resume: on every node: paceline train job.py --run-dir many --nodes 2:" in ends[0].screen
    assert "node 1: Stopped and saved." in ends[1].screen


def test_a_second_signal_to_the_head_ends_all_at_once(shop: Shop) -> None:
    nodes = nodes_of(shop, "many", "--train.steps", "500")
    nodes.start_all(environ={"PAUSE": "2"})
    wait_for_step(shop.path / "many", 1)
    for _ in range(2):
        nodes.processes[0].send_signal(signal.SIGTERM)
        time.sleep(0.3)  # two at once are one
    ends = nodes.ends()
    assert ends[0].code == 130 and ends[1].code == 130, [end.screen for end in ends]


def test_another_setting_on_a_node_is_refused_before_anything_starts(shop: Shop) -> None:
    nodes = nodes_of(shop, "many")
    nodes.start(0, "--train.max_grad_norm", "1.0")
    nodes.start(1, "--train.max_grad_norm", "2.0")
    ends = nodes.ends()
    assert [end.code for end in ends] == [2, 2], [end.screen for end in ends]
    assert "train.max_grad_norm differs: 1.0 on node 0, 2.0 on node 1" in ends[0].screen
    assert not (shop.path / "many/logs").exists()


def test_a_node_without_the_job_file_ends_all_with_its_reason(shop: Shop) -> None:
    nodes = nodes_of(shop, "many")
    nodes.start(0)
    nodes.start(1, job="missing.py")
    ends = nodes.ends()
    assert [end.code for end in ends] == [2, 2], [end.screen for end in ends]
    assert "missing.py" in ends[0].screen and "does not exist" in ends[0].screen


def test_a_head_that_refuses_its_command_says_so_to_the_others(shop: Shop) -> None:
    nodes = nodes_of(shop, "many")
    nodes.start(0, "--layout", "tp=3")
    nodes.start(1)
    ends = nodes.ends()
    assert [end.code for end in ends] == [2, 2], [end.screen for end in ends]
    assert "node 0: " in ends[1].screen, ends[1].screen


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_interface_that_a_node_does_not_have_ends_all_before_anything_starts(shop: Shop, wrong: int) -> None:
    nodes = nodes_of(shop, "many")
    for node in range(2):
        nodes.start(node, *(("--nodes.interface", "eth7") if node == wrong else ()))
    ends = nodes.ends()
    assert [end.code for end in ends] == [2, 2], [end.screen for end in ends]
    assert all("has no interface eth7" in end.screen for end in ends), [end.screen for end in ends]
    assert not (shop.path / "many/logs").exists()


@pytest.mark.parametrize("node", [0, 1])
def test_a_run_to_resume_that_is_not_there_is_said_before_the_nodes_meet(shop: Shop, node: int) -> None:
    nodes = nodes_of(shop, "many", "--resume", "runs/nowhere", "--nodes.wait", "100")
    nodes.start(node)
    end = nodes.end(node, timeout=80)
    assert end.code == 2 and end.err.startswith("error: there is no run runs/nowhere."), end.screen


def test_each_node_may_have_another_working_folder(shop: Shop) -> None:
    """The job and the run folder are then given by absolute paths."""
    nodes = nodes_of(shop, str(shop.path / "many"))
    for node in range(2):
        own = Shop(shop.path / f"folder-{node}")
        own.path.mkdir()
        nodes.processes[node] = own.start(
            "train", str(shop.path / "job.py"), "--nodes", nodes.option, "--node", str(node), *nodes.words
        )
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert shop.train("one").code == 0 and shop.digest("many") == shop.digest("one")


def test_one_command_plays_several_nodes_on_this_machine(shop: Shop) -> None:
    """It passes on its options and its exit code; standard output is that of the head alone."""
    words = ("--run-dir", "many", "--train.steps", "12", "--train.threads", "1", "--layout", "fsdp", "--json")
    done = shop.run("train", "job.py", "--nodes", "2", *words)
    assert done.code == 0 and json.loads(done.out)["digest"] == shop.digest("many"), done.err
    assert shop.train("one", "--layout", "fsdp", "--train.threads", "1").code == 0
    assert shop.digest("many") == shop.digest("one")
    refused = shop.run("train", "job.py", "--nodes", "2", "--layout", "tp=3")
    assert refused.code == 2 and "tp=3 needs 3 ranks" in refused.err


@pytest.mark.parametrize("is_for_group", [False, True])
def test_a_stop_signal_to_one_command_for_several_nodes_saves(shop: Shop, is_for_group: bool) -> None:
    """`timeout` and systemd signal the whole process group, which must not count twice."""
    process = shop.start("train", "job.py", "--nodes", "2", "--run-dir", "many", "--train.steps", "500")
    wait_for_step(shop.path / "many", 5)
    if is_for_group:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, out + err
    assert "Stopped and saved. Resume: paceline train job.py --run-dir many --nodes 2 --train.steps 500" in out + err


def test_a_node_that_does_not_come_is_missed(shop: Shop) -> None:
    nodes = nodes_of(shop, "many", "--nodes.wait", "1")
    nodes.start(0)
    end = nodes.end(0)
    assert end.code == 3 and "1 node did not come within 1 s; only the head is here" in end.screen, end.screen


def test_a_node_that_does_not_fit_does_not_end_a_run_that_waits_for_another_one(shop: Shop) -> None:
    words = ("--checkpoint.every", "1", "--nodes.restarts", "2", "--train.steps", "60", "--train.exact", "true")
    nodes = nodes_of(shop, "many", *words)
    nodes.start_all(environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "many", 5, rank=1)
    os.kill(nodes.processes[1].pid, signal.SIGKILL)
    nodes.processes[1].communicate(timeout=60)
    nodes.start(1, "--train.max_grad_norm", "3.0")
    stranger = nodes.end(1)
    assert stranger.code == 2 and "node 0 refuses: train.max_grad_norm differs" in stranger.screen, stranger.screen
    nodes.start(1)
    ends = nodes.ends()
    assert [end.code for end in ends] == [0, 0], [end.screen for end in ends]
    assert "not admitted: train.max_grad_norm differs" in ends[0].err


def test_a_node_that_waits_for_a_lost_head_in_vain_asks_to_be_started_again(shop: Shop) -> None:
    nodes = nodes_of(shop, "many", "--nodes.restarts", "1", "--nodes.wait", "2", "--train.steps", "500")
    nodes.start_all(environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "many", 3)
    os.kill(nodes.processes[0].pid, signal.SIGKILL)
    end = nodes.end(1)
    assert end.code == 75 and "is gone" in end.screen and "did not come back" in end.screen, end.screen
    assert "Resume: on every node: paceline train job.py --run-dir many" in end.screen, end.screen
    nodes.end(0)
    why = shop.run("why", "many")
    assert "node 0 (" in why.out and "is gone: its agent has ended" in why.out, why.out


def test_kill_node_kills_the_agent_of_the_rank(shop: Shop) -> None:
    nodes = nodes_of(shop, "many", "--faults", "kill_node rank=1 step=5", "--train.steps", "60")
    nodes.start_all()
    ends = nodes.ends()
    assert [end.code for end in ends] == [75, -9], [end.screen for end in ends]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "2"), "--ranks-per-node 1, the number of processes on each machine"),
        (("--layout", "threads"), "layout threads is one process"),
        (("--update", "hogwild"), "its workers share the memory of one machine"),
        (("--layout", "auto"), "--layout auto can't be chosen on several nodes yet"),
        (("--ranks-per-node", "0"), "--ranks-per-node 0: a run needs at least one rank"),
        (("--ranks-per-node", "1", "--layout", "tp=4"), "to do: --ranks-per-node 2, or --layout "),
        (("--layout", "tp=3"), "to do: --ranks 3 in place of --nodes, or --layout"),
        (
            ("--layout", "fsdp", "--update", "local,every=8"),
            "to do: --layout dp_replicate=2,dp_shard=2 --ranks-per-node 2",
        ),
    ],
)
def test_what_nodes_cannot_do_is_refused_at_once(shop: Shop, words: tuple[str, ...], says: str) -> None:
    done = shop.run("train", "job.py", "--nodes", "2:127.0.0.1:1", "--node", "1", *words, "--nodes.wait", "0.2")
    assert done.code == 2 and says in done.err + done.out, done.err + done.out


def test_a_refused_node_gives_the_reason_as_json_too(shop: Shop) -> None:
    nodes = nodes_of(shop, "many", "--json")
    nodes.start(0)
    nodes.start(1, "--train.max_grad_norm", "3.0")
    ends = nodes.ends()
    assert [end.code for end in ends] == [2, 2], [end.screen for end in ends]
    assert all("train.max_grad_norm differs" in json.loads(end.out)["what"] for end in ends), [end.out for end in ends]
