"""`--nodes 2` without a host: as root, each node has a network of its own, which the user can cut; else loopback."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.commands.common import node_networks
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
