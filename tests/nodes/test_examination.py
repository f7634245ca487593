"""The meeting of nodes and the examination, over real sockets on loopback."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.errors import MachineError, UsageError
from paceline.nodes.examination import Examination, answer_head, examine_machine, examine_nodes, take_part
from paceline.nodes.finding import Finding
from paceline.nodes.line_channel import ChannelError, LineChannel
from paceline.nodes.link_measurement import LinkResult, LinkServer, try_link
from paceline.nodes.node_meeting import Reception, listen_as_head
from paceline.nodes.node_place import NodePlace
from tests.conftest import Shop
from tests.nodes.test_fact_findings import machine
from tests.nodes.test_line_channel import as_tcp
from tests.waiting import wait_until

LOOPBACK = {"address": "127.0.0.1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Nodes:
    """A head and its members, each in a thread."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.place = NodePlace(num_nodes=num_nodes, head_host="127.0.0.1", port=free_port(), node=None)
        self.ends: list[Any] = []
        self.lines: list[str] = []
        self.threads: list[threading.Thread] = []
        listener = listen_as_head(self.place)
        assert listener is not None
        self.reception = Reception(listener, self.place)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.place.port

    def join(self, node: int | None = None, *, num_nodes: int | None = None, **changed: Any) -> None:
        own = replace(self.place, num_nodes=num_nodes or self.place.num_nodes, node=node)
        facts = machine(node or 1, **{**LOOPBACK, **changed})

        def run() -> None:
            try:
                self.ends.append(take_part(own, read_facts=lambda: facts, run_folder=self.folder, wait_seconds=5))
            except MachineError as error:
                self.ends.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def examine(self, *, wait_seconds: float = 10) -> Examination:
        try:
            return examine_nodes(
                self.reception, machine(0, **LOOPBACK), run_folder=self.folder, wait_seconds=wait_seconds,
                report=self.lines.append,
            )  # fmt: skip
        finally:
            self.reception.close()
            for thread in self.threads:
                thread.join()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, 2)
    yield nodes
    nodes.reception.close()


def said(found: Examination) -> list[str]:
    return [finding.what for finding in found.findings]


def hello(node: int | None = 1, **changed: Any) -> bytes:
    message = {"protocol": "paceline-nodes-1", "num_nodes": 2, "node": node, "host": "fake", **changed}
    return json.dumps(message).encode() + b"\n"


def test_sound_nodes_meet_and_end_alike(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "runs", 3)
    nodes.join()
    nodes.join(2)
    found = nodes.examine()
    assert said(found) == [] and found.exit_code == 0 and sorted(found.facts) == [0, 1, 2]
    assert len(found.links) == 6 and all(link.result.bytes_per_second > 1e6 for link in found.links)
    ends = sorted(nodes.ends, key=lambda end: end["node"])
    assert ends == [{"node": node, "exit_code": 0, "text": "nothing is wrong"} for node in (1, 2)]
    assert not (tmp_path / "runs").exists(), "the run folder was created for the check only"


def test_a_clock_that_is_off_is_measured_over_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path, 3)
    read_time, ahead = time.time, set[int]()

    def shifted() -> float:
        return read_time() + (7.0 if threading.get_ident() in ahead else 0.0)

    monkeypatch.setattr("paceline.nodes.examination.time.time", shifted)
    nodes.join(1)
    nodes.join(2)
    ahead.add(nodes.threads[0].ident or 0)
    found = nodes.examine()
    (what,) = said(found)
    assert what.startswith("node 1 (host1): the clock is +7.0 s off")


def test_strangers_do_not_hold_up_the_others_and_who_is_missing_is_named(tmp_path: Path) -> None:
    """One says nothing, one drips bytes, and three send something else."""
    nodes = Nodes(tmp_path, 3)
    strangers = [socket.create_connection(nodes.address) for _ in range(5)]
    lines = [b"", b"[", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000 + b"\n", hello(num_nodes=3, host="\x1b[31m")]
    for stranger, line in zip(strangers, lines, strict=True):
        stranger.sendall(line)
    nodes.join(1)
    start_time = time.monotonic()
    found = nodes.examine(wait_seconds=2)
    assert time.monotonic() - start_time < 20 and sorted(found.facts) == [0, 1]
    assert (
        said(found) == [f"node 2 did not come within 2 s; here are the head, {socket.gethostname()}"]
        and found.exit_code == 3
    )
    assert nodes.ends == [{"node": 1, "exit_code": 3, "text": "node 0 found a problem"}]
    for stranger in strangers:
        stranger.close()


def test_while_it_waits_it_says_who_is_here(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.nodes.examination._FIRST_REPORT_SECONDS", 0.2)
    two.examine(wait_seconds=1)
    assert two.lines and two.lines[0].startswith("1 of 2 nodes are here: the head; missing: node 1; waiting for ")


def test_the_first_word_of_a_wait_comes_within_a_second(two: Nodes) -> None:
    two.examine(wait_seconds=0.9)
    assert two.lines and two.lines[0].startswith("1 of 2 nodes are here: the head; missing: node 1; waiting for ")


@pytest.mark.parametrize(("message", "says"), [
    ({"node": 0}, "fake says that it is node 0, and so does the head"),
    ({"node": 9}, "fake says that it is node 9, and there are nodes 0 to 1"),
    ({"num_nodes": 4}, "fake expects 4 nodes, and the head 2"),
    ({"num_nodes": 4, "counts": "3:4"}, "fake expects 3 to 4 nodes, and the head 2"),
    ({"protocol": "paceline-nodes-9"}, "fake has another version of Paceline"),
])  # fmt: skip
def test_a_node_that_does_not_belong_here_is_sent_away_and_named(
    two: Nodes, message: dict[str, Any], says: str
) -> None:
    with socket.create_connection(two.address) as connection:
        connection.sendall(hello(**message))
        answer = json.loads(connection.recv(1000))
    assert answer == {"do": "end", "node": None, "exit_code": 2, "text": says}
    assert said(two.examine(wait_seconds=0.1)) == [says]


def test_a_node_that_starts_again_during_the_wait_takes_its_own_seat(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    for _ in range(2):
        with socket.create_connection(nodes.address) as connection:
            connection.sendall(hello(1, num_nodes=3))
            assert b"welcome" in connection.recv(1000)
    nodes.join(1)
    nodes.join(2)
    found = nodes.examine()
    assert said(found) == [] and [end["exit_code"] for end in nodes.ends] == [0, 0]


def test_a_node_too_many_is_told_so(two: Nodes) -> None:
    two.join(1)
    deadline = time.monotonic() + 10
    while not two.reception._arrivals and time.monotonic() < deadline:
        time.sleep(0.01)
    with socket.create_connection(two.address) as connection:
        connection.sendall(hello(None))
        assert json.loads(connection.recv(1000))["text"] == "all nodes are here already"
    assert said(two.examine()) == []


def join_as_fake(connection: socket.socket, **changed: Any) -> Any:
    """Say hello and read the welcome; the requests of the head follow in the returned stream."""
    stream = connection.makefile("rw")
    stream.write(hello(**changed).decode())
    stream.flush()
    assert "welcome" in stream.readline()
    return stream


def answers(connection: socket.socket, num_answers: int) -> None:
    """Be a member that answers some requests, and then leaves."""
    stream = join_as_fake(connection)
    for _ in range(num_answers):
        request = json.loads(stream.readline())
        if request["do"] == "facts":
            stream.write('"facts follow"\n' + json.dumps(msgspec.to_builtins(machine(1, **LOOPBACK))) + "\n")
        elif request["do"] == "clock":
            stream.write(f"{time.time()}\n")
        elif request["do"] == "serve":
            stream.write('["127.0.0.1", 1]\n')
        stream.flush()


@pytest.mark.parametrize("num_answers", [0, 1, 3, 7])
def test_a_member_that_leaves_at_any_point_is_one_finding(two: Nodes, num_answers: int) -> None:
    def be_member() -> None:
        with socket.create_connection(two.address) as connection:
            answers(connection, num_answers)

    thread = threading.Thread(target=be_member)
    thread.start()
    (what,) = said(two.examine())
    thread.join()
    assert what.startswith("node 1 (fake) came, but then left: ")


def test_a_member_that_answers_nonsense_ends_nothing(two: Nodes) -> None:
    def be_member() -> None:
        with socket.create_connection(two.address) as connection:
            stream = join_as_fake(connection)
            stream.write('"facts follow"\n{"host": 1}\n')
            stream.flush()
            stream.readline()

    thread = threading.Thread(target=be_member)
    thread.start()
    (what,) = said(two.examine())
    thread.join()
    assert what.startswith("node 1 (fake) came, but then left: ")


def test_large_messages_that_do_not_arrive_are_a_matter_of_the_network(
    two: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.nodes.examination._SHORT_SECONDS", 0.3)
    monkeypatch.setattr("paceline.nodes.examination._STUCK_SECONDS", 0.2)

    def be_member() -> None:
        with socket.create_connection(two.address) as connection:
            stream = join_as_fake(connection)
            stream.write('"facts follow"\n')
            stream.flush()
            heard.append(json.loads(stream.readline()))
            heard.append(json.loads(stream.readline()))

    heard: list[dict[str, Any]] = []
    thread = threading.Thread(target=be_member)
    thread.start()
    (what,) = said(two.examine())
    thread.join()
    assert "only small messages arrive" in what
    assert heard[1]["do"] == "end" and heard[1]["exit_code"] == 3 and what in heard[1]["text"], heard
    assert "lower the MTU" in heard[1]["text"]


def test_a_large_message_for_which_the_system_of_a_node_gives_up_is_a_matter_of_the_network(
    two: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that has left has sent its facts before, so they would have arrived."""
    monkeypatch.setattr("paceline.nodes.examination._STUCK_SECONDS", 0.3)

    def be_member() -> None:
        with socket.create_connection(two.address) as connection:
            stream = join_as_fake(connection)
            stream.write('"facts follow"\n')
            stream.flush()
            time.sleep(1)
            stream.close()

    thread = threading.Thread(target=be_member)
    thread.start()
    (what,) = said(two.examine())
    thread.join()
    assert "only small messages arrive" in what


def test_a_member_on_the_machine_of_the_head_that_says_it_is_node_1_is_told_where_it_is(tmp_path: Path) -> None:
    place = NodePlace(num_nodes=2, head_host="127.0.0.1", port=free_port(), node=1)
    with pytest.raises(MachineError, match="itself, the host of node 0") as caught:
        take_part(place, read_facts=machine, run_folder=tmp_path, wait_seconds=0.3)
    assert caught.value.hint.startswith("--node 0, or no --node")
    with pytest.raises(MachineError) as caught:
        take_part(replace(place, is_played=True), read_facts=machine, run_folder=tmp_path, wait_seconds=0.3)
    assert "itself" not in caught.value.what


@pytest.mark.parametrize(("error", "cause"), [
    (ChannelError("closed"), "has given this node up"), (TimeoutError(), "or no large packets"),
    (ConnectionRefusedError(), ""), (KeyError("do"), ""),
])  # fmt: skip
def test_the_cause_of_a_lost_connection_is_only_said_if_it_is_known(
    two: Nodes, error: Exception, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = LineChannel(as_tcp(ours))
        monkeypatch.setattr(channel, "receive", fail)
        with pytest.raises(MachineError) as caught:
            answer_head(channel, two.place, read_facts=machine, run_folder=two.folder)
    assert cause in caught.value.cause and bool(cause) == bool(caught.value.cause)


def test_another_working_folder_is_said_with_both_paths(two: Nodes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    two.folder, here = other, two.folder
    two.join(1)
    wait_until(lambda: bool(two.reception._arrivals))
    two.folder = here
    (what,) = said(two.examine())
    assert what == f"node 1 ({socket.gethostname()}): the run folder is {other} there, and {here} on node 0"


def test_another_run_folder_of_the_command_is_one_finding(two: Nodes, tmp_path: Path) -> None:
    two.folder, here = tmp_path / "other", two.folder
    two.join(1, command={"run folder": "other"})
    wait_until(lambda: bool(two.reception._arrivals))
    two.folder = here
    (what,) = said(two.examine())
    assert what == "run folder differs: unset on node 0, other on node 1"


def test_who_is_missing_is_one_finding_and_who_was_sent_away_and_came_again_is_none(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 4)
    (what,) = said(nodes.examine(wait_seconds=0.1))
    assert what == "3 nodes did not come within 0 s; only the head is here"
    nodes = Nodes(tmp_path, 2)
    with socket.create_connection(nodes.address) as connection:
        connection.sendall(hello(9, host=socket.gethostname()))
        assert b"says that it is node 9" in connection.recv(1000)
    nodes.join(1)
    assert said(nodes.examine()) == []


def test_a_problem_of_the_member_is_its_own_and_not_that_of_the_head(two: Nodes) -> None:
    def fail() -> Any:
        raise PermissionError(13, "Permission denied", "METADATA")

    def run() -> None:
        with pytest.raises(MachineError) as caught:
            take_part(replace(two.place, node=1), read_facts=fail, run_folder=two.folder, wait_seconds=5)
        two.ends.append(caught.value.what)

    two.threads.append(threading.Thread(target=run))
    two.threads[0].start()
    (what,) = said(two.examine())
    assert what.startswith("node 1") and "came, but then left" in what
    assert two.ends == ["this machine can't answer node 0: [Errno 13] Permission denied: 'METADATA'."]


def test_a_link_that_was_slow_once_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy processor makes one ping long."""
    results = [
        LinkResult(ping_seconds=0.024, bytes_per_second=9e8),
        LinkResult(ping_seconds=1e-4, bytes_per_second=8e8),
    ]
    monkeypatch.setattr("paceline.nodes.link_measurement._try_once", lambda *_, **__: results.pop(0))
    assert not try_link(("127.0.0.1", 1), stream_seconds=0.1).is_slow and results == []


def test_a_head_that_ends_is_an_error_of_the_member(two: Nodes) -> None:
    two.join(1)
    deadline = time.monotonic() + 10
    while not two.reception._arrivals and time.monotonic() < deadline:
        time.sleep(0.01)
    two.reception._arrivals[0].channel.close()
    two.threads[0].join()
    (error,) = two.ends
    assert (
        isinstance(error, MachineError) and error.what == "the connection to node 0 ended: the connection was closed."
    )


def test_a_head_that_is_not_there_is_an_error_with_the_line_to_type(tmp_path: Path) -> None:
    place = NodePlace(num_nodes=2, head_host="127.0.0.1", port=free_port(), node=None)
    with pytest.raises(MachineError) as caught:
        take_part(place, read_facts=machine, run_folder=tmp_path, wait_seconds=0.3)
    assert "can't be reached: Connection refused" in caught.value.what and "nc -vz 127.0.0.1" in caught.value.hint
    place = NodePlace(num_nodes=2, head_host="no-such-host.invalid", port=1, node=1)
    with pytest.raises(MachineError) as caught:
        take_part(place, read_facts=machine, run_folder=tmp_path, wait_seconds=0.3)
    assert caught.value.what == "the host no-such-host.invalid has no address."


def test_node_0_must_be_the_machine_where_they_meet() -> None:
    place = NodePlace(num_nodes=2, head_host="192.0.2.1", port=1, node=0)
    with pytest.raises(UsageError) as caught:
        listen_as_head(place)
    assert caught.value.what == "this is node 0, but 192.0.2.1 (192.0.2.1) is another machine."


def test_a_link_is_measured_and_a_closed_port_is_refused() -> None:
    server = LinkServer("127.0.0.1")
    result = try_link(server.address, stream_seconds=0.02)
    assert not result.problem and result.bytes_per_second > 1e6 and 0 < result.ping_seconds < 1
    server.close()
    assert "refused" in try_link(server.address, stream_seconds=0.02).problem


def test_a_link_on_which_nothing_comes_back_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.nodes.link_measurement._TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = try_link(silent.getsockname(), stream_seconds=0.02)
    assert result.problem.startswith("connected, then nothing")


def test_a_run_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = examine_machine(machine(0), run_folder=tmp_path / "file" / "runs").findings
    assert "can't be written: Not a directory" in finding.what


@pytest.mark.parametrize(("blamed", "num_nodes", "hosts"), [
    ([(1,)], 3, ["host1"]), ([(1,), (2,)], 5, ["host1", "host2"]), ([(1,), (2,)], 3, []), ([(0,)], 3, []), ([(1,)], 2, []),
    ([()], 3, []),
])  # fmt: skip
def test_less_than_half_of_the_nodes_and_never_the_head_are_excluded(
    blamed: list[tuple[int, ...]], num_nodes: int, hosts: list[str]
) -> None:
    findings = tuple(Finding(what="", hint="", nodes=nodes) for nodes in blamed)
    facts = {node: machine(node) for node in range(num_nodes)}
    found = Examination(facts=facts, findings=findings, num_nodes=num_nodes)
    assert found.excluded_hosts == hosts
    notes = tuple(Finding(what="", hint="", nodes=nodes, is_note=True) for nodes in blamed)
    assert Examination(facts=facts, findings=notes, num_nodes=num_nodes).exit_code == 0


def test_a_host_name_that_a_sound_node_has_too_is_not_excluded() -> None:
    facts = {node: machine(node, host="ip-10") for node in range(3)}
    blame = (Finding(what="", hint="", nodes=(1,)),)
    found = Examination(facts=facts, findings=blame, num_nodes=3)
    assert found.excluded_hosts == [] and found.host_names[1] == "ip-10 at 10.0.0.2"


def test_one_machine_alone(shop: Shop) -> None:
    ended = shop.run("doctor", "job.py")
    assert ended.out.startswith("this machine: ") and ended.code == (3 if "WRONG" in ended.out else 0), ended.text
    assert not (shop.path / "runs").exists()
    found = shop.run("doctor", "--json").json()
    assert found["num_nodes"] == 1 and found["nodes"]["0"]["cores"] >= 1 and found["exclude"] == []
    missing = shop.run("doctor", "nowhere.py")
    assert missing.code == 2 and "nowhere.py does not exist" in missing.err, missing.text


def test_a_task_of_srun_that_is_not_the_first_of_its_node_does_nothing(shop: Shop) -> None:
    step = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_NODEID": "0",
        "SLURM_LOCALID": "1", "SLURM_PROCID": "1",
    }  # fmt: skip
    ended = shop.run("doctor", environ=step)
    assert ended.code == 0 and ended.out.strip() == "", ended.text


def test_a_stranger_at_the_port_of_the_head_is_named(tmp_path: Path) -> None:
    """On loopback: a program listens there that says nothing sensible."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        command = [sys.executable, "-m", "paceline", "doctor", "--nodes", f"2:127.0.0.1:{port}"]
        ended = subprocess.run(
            [*command, "--node", "1"], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
            env=dict(os.environ),
        )  # fmt: skip
        assert ended.returncode == 3 and "another program than paceline answers" in ended.stderr, ended.stderr
        head = subprocess.run(
            [*command, "--node", "0"], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
        )
    assert head.returncode == 3 and "can't listen on port" in head.stderr and "ss -ltnp" in head.stderr, head.stderr


def test_the_output_of_the_doctor_says_where_the_nodes_meet(tmp_path: Path) -> None:
    place = f"2:127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "paceline", "doctor", "--nodes", place]
    with subprocess.Popen([*command, "--node", "1"], cwd=tmp_path, stdout=subprocess.DEVNULL) as member:
        head = subprocess.run(
            [*command, "--node", "0", "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
        )
        member.wait(timeout=60)
    found = json.loads(head.stdout)
    assert f"{found['num_nodes']}:{found['head']}" == place, head.stderr
