"""`--nodes 2` without a host: as root, each node has a network of its own, which the user can cut; else loopback."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.commands.common import local_nodes, node_networks
from paceline.config.secret_settings import HIDDEN
from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import wait_for_step, written
from tests.nodes.network_nodes import ENVIRON, can_make_nodes

pytestmark = pytest.mark.one_worker
needs_root = pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root; the nodes use loopback")
WORDS = ("train", "job.py", "--nodes", "2", "--train.threads", "1")


def namespaces(pid: int) -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(f"paceline-{pid}-"))


@needs_root
def test_a_node_that_the_user_cuts_off_by_the_printed_line_is_lost_and_no_network_is_left(shop: Shop) -> None:
    words = (*WORDS, "--run-dir", "cut", "--train.steps", "5000", "--nodes.patience", "3")
    process = shop.start(*words, environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "cut", 5)
    name = f"paceline-{process.pid}-node1"
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True, env=ENVIRON)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert f"cut a node off: ip -n {name} link set eth0 down (or up)" in err
    assert re.search(r"node 1 \(node1, rank 1\) is gone: nothing for 3 s; last step \d+", err), err
    assert namespaces(process.pid) == []


@needs_root
def test_why_explains_a_run_on_played_nodes_from_outside_of_them(shop: Shop) -> None:
    words = (*WORDS, "--run-dir", "seen", "--train.steps", "5000", "--nodes.patience", "3")
    process = shop.start(*words, environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "seen", 5)
    running = shop.run("why", "seen")
    assert running.code == 0 and "seen: running, attempt 1, step " in running.out, running.text
    assert re.search(r"  rank 0 \(PID \d+\)  step \d+", running.out), running.out
    inside = [pid for name in namespaces(process.pid) for pid in _pids(name)]
    process.send_signal(signal.SIGKILL)
    for pid in inside:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    process.communicate(timeout=60)
    ended = shop.run("why", "seen")
    assert ended.code == 0 and re.search(r"seen: (killed|failed), attempt 1, step [1-9]", ended.out), ended.text
    assert "\nResume: paceline train job.py" in ended.out and "\n  it " in ended.out, ended.out


@needs_root
def test_a_head_that_is_cut_off_says_so_and_continues_once_its_link_is_back(shop: Shop) -> None:
    words = ("--nodes.patience", "3", "--nodes.restarts", "1", "--checkpoint.every", "5", "--train.steps", "60")
    process = shop.start(
        "train", "job.py", "--nodes", "3", "--train.threads", "1", "--run-dir", "cut", *words, environ={"PAUSE": "0.03"}
    )
    wait_for_step(shop.path / "cut", 8)
    name = f"paceline-{process.pid}-node0"
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True, env=ENVIRON)
    line = _printed_line(process, "node 0 (node0, rank 0) itself is probably cut off from the network: ")
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True, env=ENVIRON)
    assert re.fullmatch(
        r"nothing for \d s from node \d \(node\d, rank \d\) and node \d \(node\d, rank \d\); last step \d+; "
        r"waiting for the others \(restart 1 of 1\)",
        line,
    ), line
    assert process.stderr is not None
    hint = process.stderr.readline()
    way = r"then the way to another node \(ping 10\.83\.0\.[23]\)\n"
    assert re.fullmatch(rf"  check first, on node 0: its link \(ip -br link\), {way}", hint), hint
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err


@needs_root
def test_a_killed_start_leaves_networks_that_the_next_one_removes(shop: Shop) -> None:
    first = shop.start(*WORDS, "--run-dir", "first", "--train.steps", "5000", environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "first", 2)
    names = namespaces(first.pid)
    assert len(names) == 3
    inside = [int(pid) for name in names for pid in _pids(name)]
    assert inside
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert namespaces(first.pid) == names
    deadline = time.monotonic() + 20
    while any(Path("/proc", str(pid)).exists() for pid in inside):
        assert time.monotonic() < deadline, "the nodes outlive the command that plays them"
        time.sleep(0.05)
    own = f"paceline-{os.getpid()}-node0"  # of a process that runs
    subprocess.run(["ip", "netns", "add", own], check=True, env=ENVIRON)
    try:
        done = shop.run(*WORDS, "--run-dir", "next", "--train.steps", "4")
        assert done.code == 0, done.text
        assert namespaces(first.pid) == [] and namespaces(os.getpid()) == [own]
    finally:
        subprocess.run(["ip", "netns", "delete", own], check=True, env=ENVIRON)


@needs_root
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_node_starts_again_by_the_printed_line(shop: Shop, node: int) -> None:
    words = (*WORDS, "--run-dir", "many", "--nodes.restarts", "1", "--checkpoint.every", "5", "--train.steps", "60")
    process = shop.start(*words, environ={"PAUSE": "0.03"})
    line = _printed_line(process, "start a killed node again: ")
    assert line.endswith("--nodes 2:10.83.0.1 --node 1") and f"paceline-{process.pid}-node1" in line, line
    line = line.replace("-node1 ", f"-node{node} ").replace("--node 1", f"--node {node}")
    wait_for_step(shop.path / "many", 8, rank=1)
    for pid in _pids(f"paceline-{process.pid}-node{node}"):
        with suppress(ProcessLookupError):  # it has ended with its parent
            os.kill(int(pid), signal.SIGKILL)
    typed = line.replace(" paceline train ", f" {sys.executable} -m paceline train ", 1)
    again = shop.call(["sh", "-c", typed], environ={"PAUSE": "0.03"})
    assert again.code == 0, again.text
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Resume: " not in err, "the run has ended well, whoever trained it: " + out + err
    assert written(shop.path / "many", "weights.json")["step"] == 60


@needs_root
def test_the_networks_stay_for_nodes_that_were_started_again(shop: Shop) -> None:
    """Once both nodes have been killed, only commands that the user has typed train in the networks."""
    words = (*WORDS, "--run-dir", "many", "--nodes.restarts", "2", "--checkpoint.every", "5", "--train.steps", "90")
    process = shop.start(*words, environ={"PAUSE": "0.03"})
    line = _printed_line(process, "start a killed node again: ").replace(
        " paceline train ", f" {sys.executable} -m paceline train ", 1
    )
    typed = []
    for node, attempt, step in ((1, 1, 8), (0, 2, 30)):
        wait_for_step(shop.path / "many", step, attempt=attempt)
        for pid in _pids(f"paceline-{process.pid}-node{node}"):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        own = line.replace("-node1 ", f"-node{node} ").replace("--node 1", f"--node {node}")
        command = ["sh", "-c", own]
        environ = {**os.environ, "PAUSE": "0.03"}
        typed.append(subprocess.Popen(command, cwd=shop.path, env=environ, stderr=subprocess.PIPE, text=True))
    ends = [again.communicate(timeout=120)[1] for again in typed]
    out, err = process.communicate(timeout=60)
    assert [again.returncode for again in typed] == [0, 0], [*ends, err]
    assert process.returncode == 0, out + err
    assert "still run here, started again by hand; their networks stay until they end" in err, err
    assert written(shop.path / "many", "weights.json")["step"] == 90
    assert namespaces(process.pid) == []


def test_on_the_loopback_interface_the_line_has_the_port(shop: Shop) -> None:
    words = (*WORDS, "--run-dir", "many", "--nodes.restarts", "1", "--train.steps", "4")
    done = shop.run(*words, environ={"PACELINE_LOOPBACK": "1"})
    line = re.search(r"start a killed node again: PACELINE_PLAYED_NODES=2 (paceline train .*)", done.err)
    assert line is not None and re.search(r"--nodes 2:127\.0\.0\.1:\d+ --node 1$", line[1]), done.text


def test_the_line_shows_no_secret() -> None:
    typed = ["--job.token", "abc", "--job.api_key=def", "--train.steps", "4", "--train.exact=true"]
    shown = ["--job.token", HIDDEN, f"--job.api_key={HIDDEN}", "--train.steps", "4", "--train.exact=true"]
    assert local_nodes._without_secrets(typed) == shown


def test_no_line_starts_a_node_again_if_nobody_waits_for_it(shop: Shop) -> None:
    done = shop.run(*WORDS, "--run-dir", "many", "--train.steps", "4", environ={"PACELINE_LOOPBACK": "1"})
    assert done.code == 0 and "start a killed node again" not in done.err, done.text


def _printed_line(process: "subprocess.Popen[str]", prefix: str) -> str:
    """Return what follows the prefix on the screen, as soon as it is there."""
    assert process.stderr is not None
    while prefix not in (line := process.stderr.readline()):
        assert line, f"no line with {prefix!r}"
    return line.partition(prefix)[2].strip()


def _pids(name: str) -> list[str]:
    shown = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True, env=ENVIRON)
    return shown.stdout.split()


def test_networks_and_loopback_give_the_same_weights_and_say_what_they_are(shop: Shop) -> None:
    default = shop.run(*WORDS, "--run-dir", "default", "--train.steps", "6")
    loopback = shop.run(*WORDS, "--run-dir", "loop", "--train.steps", "6", environ={"PACELINE_LOOPBACK": "1"})
    assert (default.code, loopback.code) == (0, 0), default.text + loopback.text
    assert "2 nodes as processes on 127.0.0.1: PACELINE_LOOPBACK is set" in loopback.err
    said = "each with a network of its own" if can_make_nodes() else "2 nodes as processes on 127.0.0.1: "
    assert said in default.err, default.err
    assert (
        written(shop.path / "default", "weights.json")["digest"]
        == written(shop.path / "loop", "weights.json")["digest"]
    )


def test_without_root_or_a_tool_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_LOOPBACK", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with node_networks.open_node_networks(2) as found:
        assert found == "network namespaces need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "none"))
    with node_networks.open_node_networks(2) as found:
        assert found == "ip, unshare, mount, hostname is not installed"
