"""Ctrl-C while a run on several nodes waits for one of them: it is no failure."""

import os
import signal
import subprocess
from typing import ClassVar
from unittest.mock import Mock

import pytest

from paceline.commands.common import node_start
from paceline.commands.common.node_start import NodeStart
from paceline.config.task import Task
from paceline.errors import MachineError
from paceline.nodes.node_place import NodePlace
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


class Group:
    """A group that records how it ended the members."""

    ends: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def end(self, code: int, text: str) -> None:
        self.ends.append((code, text))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> NodeStart:
    """The head of two nodes, whose other one has come."""
    monkeypatch.setattr(Group, "ends", [])
    monkeypatch.setattr(node_start, "NodeGroup", Group)
    monkeypatch.setattr(node_start, "NodeAdmission", Mock())
    monkeypatch.setattr(node_start, "read_machine_facts", Mock())
    place = NodePlace(num_nodes=2, head_host="host1", port=29400, node=0)
    made = NodeStart(place, Task(verb="train", job="job.py", ranks=2, nodes="2:host1"), node_counts=(2,))
    monkeypatch.setattr(made, "_listener", Mock())
    return made


def test_ctrl_c_before_the_first_attempt_ends_the_members_with_its_code(
    start: NodeStart, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), start.lead():
        raise KeyboardInterrupt
    assert Group.ends[0] == (130, "node 0 was stopped") and capfd.readouterr().err == "stopped\n"


def test_an_error_of_the_head_advises_what_fits_several_nodes(start: NodeStart) -> None:
    with pytest.raises(MachineError) as caught, start.lead():
        raise MachineError(
            "127.0.0.1 can't be reached.", hint="ip link set lo up; or --ranks 1, which needs no network"
        )
    assert caught.value.hint.endswith("or --ranks 1 in place of --nodes, which needs no network")
    assert Group.ends[0][0] == 3 and "in place of --nodes" in Group.ends[0][1]
