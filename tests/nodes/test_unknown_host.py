"""A node whose `--nodes` names a host without an address: it says so at once, and tries again, but not for ever."""

import itertools
import math
import socket
from collections.abc import Callable

import pytest

from paceline.cli import main
from paceline.commands.common import node_start
from paceline.config.task import Task
from paceline.errors import MachineError
from paceline.nodes import head_connection
from paceline.nodes.head_connection import join_head
from paceline.nodes.node_place import NodePlace
from tests.waiting import wait_until

PLACE = NodePlace(num_nodes=2, head_host="nohost", port=29400, node=1)
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


class Clock:
    """A clock on which only a sleep takes time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.monotonic = lambda: self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def connect_with(error: Callable[[], OSError]) -> Callable[..., socket.socket]:
    def connect(*_: object, **__: object) -> socket.socket:
        raise error()

    return connect


def no_name() -> OSError:
    return socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(head_connection, "time", made)
    monkeypatch.setattr(head_connection, "resolve_host", lambda _: "")
    monkeypatch.setattr(socket, "create_connection", connect_with(no_name))
    return made


def test_an_unknown_host_is_said_at_once_and_given_up_early(clock: Clock) -> None:
    lines: list[tuple[float, str]] = []
    start = clock.now
    with pytest.raises(MachineError, match="the host nohost has no address") as caught:
        join_head(PLACE, wait_seconds=300, host_seconds=20, report=lambda line: lines.append((clock.now, line)))
    assert lines == [(start, "the host nohost has no address. Trying again for 20 s")]
    assert 20 <= clock.now - start < 21
    assert "getent hosts nohost" in caught.value.hint and "--nodes 2:IP" in caught.value.hint


def test_under_a_scheduler_it_is_tried_for_the_whole_wait_and_rarely_said_again(clock: Clock) -> None:
    times: list[float] = []
    start = clock.now
    with pytest.raises(MachineError):
        join_head(PLACE, wait_seconds=300, report=lambda _: times.append(clock.now - start))
    assert clock.now - start >= 300
    assert [round(at) for at in times] == [0, 60, 120, 180, 240]


def test_a_host_that_gets_its_address_late_has_the_whole_wait(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = itertools.chain([no_name() for _ in range(50)], itertools.repeat(ConnectionRefusedError("refused")))
    monkeypatch.setattr(socket, "create_connection", connect_with(lambda: next(errors)))
    lines: list[str] = []
    start = clock.now
    with pytest.raises(MachineError, match="can't be reached: refused"):
        join_head(PLACE, wait_seconds=60, host_seconds=20, report=lines.append)
    assert clock.now - start >= 60
    assert len(lines) == 2 and "has no address" in lines[0] and "can't be reached" in lines[1]


@pytest.mark.parametrize(("environ", "seconds"), [({}, head_connection.UNKNOWN_HOST_SECONDS), (POD, math.inf)])
def test_the_command_gives_an_unknown_host_up_early_only_without_a_scheduler(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], seconds: float
) -> None:
    found: list[float] = []

    def join(*_: object, host_seconds: float, **__: object) -> None:
        found.append(host_seconds)
        raise MachineError("no head")

    for name in ("KUBERNETES_SERVICE_HOST", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(node_start, "join_head", join)
    task = Task(verb="train", job="job.py", ranks=2, nodes="2:nohost")
    with pytest.raises(MachineError, match="no head"):
        node_start.NodeStart(PLACE, task, node_counts=(2,)).run_member()
    assert found == [seconds]


def test_the_doctor_says_at_once_that_a_host_is_unknown_and_gives_it_up_early(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    start = clock.now
    assert main(["doctor", "--nodes", "3:nohost", "--wait", "300"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("the host nohost has no address. Trying again for 20 s\nerror: "), said
    assert clock.now - start < 21


def test_the_doctor_says_soon_that_the_head_is_not_there(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "create_connection", connect_with(lambda: ConnectionRefusedError("refused")))
    assert main(["doctor", "--nodes", "3:nohost", "--node", "1", "--wait", "4"]) == 3
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "the head nohost, port 29400, can't be reached: refused. Trying again for 3 s", first


def test_a_lookup_that_takes_long_is_said_while_it_lasts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look_up(_: str) -> str:
        monkeypatch.setattr(head_connection, "resolve_host", lambda _: "")
        wait_until(lambda: "looking up the address of nohost" in capsys.readouterr().err, seconds=10)
        return ""

    monkeypatch.setattr(head_connection, "resolve_host", look_up)
    assert main(["doctor", "--nodes", "3:nohost", "--wait", "0.5"]) == 3
