"""Ctrl-C while a run on several nodes waits for one of them: it is no failure."""

import os
import signal
import subprocess

import pytest

from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import OwnNodes, wait_for_step

WORDS = ("--run-dir", "many", "--train.steps", "2000", "--train.threads", "1")


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    """Read standard error up to the line with a text."""
    assert process.stderr is not None
    read = ""
    for line in process.stderr:
        read += line
        if text in line:
            return read
    raise AssertionError(f"no {text!r} in {read}")


def read_end(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """The exit code, and the rest of both outputs."""
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        rest = process.stdout.read() + process.stderr.read()
    return process.wait(timeout=60), rest


@pytest.mark.parametrize("stopped", [0, 1])
def test_ctrl_c_before_all_nodes_are_there(shop: Shop, stopped: int) -> None:
    nodes = OwnNodes(shop, 3, WORDS)
    for node in (0, 1):
        nodes.start(node)
    head, member = nodes.processes[0], nodes.processes[1]
    read_until(head, "2 of 3 nodes are here")
    nodes.processes[stopped].send_signal(signal.SIGINT)
    code, text = read_end(nodes.processes[stopped])
    assert code == 130 and "stopped while waiting for the other nodes" in text, text
    assert "FAILED" not in text and "Traceback" not in text, text
    if stopped == 0:
        code, text = read_end(member)
        assert code == 130 and "node 0 was stopped" in text and "FAILED" not in text, text
    else:
        head.send_signal(signal.SIGINT)
        assert read_end(head)[0] == 130, "the head waits on until it is stopped, too"


def test_ctrl_c_while_the_place_of_a_lost_node_is_free(shop: Shop) -> None:
    nodes = OwnNodes(shop, 2, (*WORDS, "--nodes.restarts", "2", "--checkpoint.every", "1"))
    nodes.start_all(environ={"PAUSE": "0.02"})
    wait_for_step(shop.path / "many", 3)
    os.kill(nodes.processes[1].pid, signal.SIGKILL)
    nodes.end(1)
    head = nodes.processes[0]
    read_until(head, "waiting for node 1, for")
    head.send_signal(signal.SIGINT)
    code, text = read_end(head)
    assert code == 130, text
    assert "stopped while waiting for another node" in text and "FAILED" not in text, text
    assert "Resume from the last save: on every node: paceline train job.py --run-dir many --nodes 2:" in text, text
