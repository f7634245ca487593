"""The meeting of nodes and the examination, over real sockets on loopback."""

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import MachineError
from paceline.nodes.examination import Examination, examine_nodes, take_part
from paceline.nodes.link_test import LinkServer, try_link
from paceline.nodes.machine_facts import read_machine_facts
from paceline.nodes.node_meeting import listen_as_head
from paceline.nodes.node_place import NodePlace
from tests.conftest import Shop


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def facts(folder: Path) -> Any:
    return read_machine_facts(head_host="127.0.0.1", run_folder=folder, code={}, data={})


class Nodes:
    """A head and its members, each in a thread."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.place = NodePlace(num_nodes=num_nodes, head_host="127.0.0.1", port=free_port(), node=None)
        self.ends: list[Any] = []
        self.lines: list[str] = []
        listener = listen_as_head(self.place)
        assert listener is not None
        self.listener = listener
        self.threads: list[threading.Thread] = []

    def join(self, node: int | None = None, *, num_nodes: int | None = None) -> None:
        place = NodePlace(
            num_nodes=num_nodes or self.place.num_nodes, head_host="127.0.0.1", port=self.place.port, node=node
        )

        def run() -> None:
            try:
                self.ends.append(take_part(place, facts(self.folder), run_folder=self.folder, wait_seconds=5))
            except MachineError as error:
                self.ends.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def examine(self, *, wait_seconds: float = 10) -> Examination:
        try:
            return examine_nodes(
                self.listener, self.place, facts(self.folder), run_folder=self.folder, wait_seconds=wait_seconds,
                report=self.lines.append,
            )  # fmt: skip
        finally:
            for thread in self.threads:
                thread.join()


def test_sound_nodes_meet_and_end_alike(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    nodes.join()
    nodes.join(2)
    found = nodes.examine()
    assert found.findings == () and found.exit_code == 0 and sorted(found.facts) == [0, 1, 2]
    assert len(found.links) == 6 and all(link.result.bytes_per_second > 1e6 for link in found.links)
    assert nodes.ends == [(0, "nothing is wrong")] * 2


def test_strangers_are_ignored_and_who_is_missing_is_named(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    address = ("127.0.0.1", nodes.place.port)
    with socket.create_connection(address) as http, socket.create_connection(address) as silent:
        http.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent.close()
        nodes.join(1)
        found = nodes.examine(wait_seconds=3)
    (finding,) = found.findings
    assert finding.what == "node 2 did not come within 3 s" and found.exit_code == 3
    assert nodes.ends == [(3, "node 0 found a problem")]


def test_while_it_waits_it_says_who_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.nodes.node_meeting._REPORT_SECONDS", 0.2)
    nodes = Nodes(tmp_path, 2)
    nodes.examine(wait_seconds=1)
    assert nodes.lines and nodes.lines[0].startswith("1 of 2 nodes are here: ")


def test_a_number_that_comes_twice_and_another_number_of_nodes_are_named(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    nodes.join(1)
    nodes.join(1)
    nodes.join(2, num_nodes=4)
    found = nodes.examine(wait_seconds=3)
    said = " | ".join(finding.what for finding in found.findings)
    assert "node number 1 came twice" in said and "expects 4 nodes, and the head 3" in said
    assert "node 2 did not come" in said and [end[0] for end in nodes.ends] == [3, 3, 3]


def test_a_member_that_leaves_in_the_middle_is_named(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)

    def leave() -> None:
        hello = {"protocol": "paceline-nodes-1", "num_nodes": 2, "node": 1}
        with socket.create_connection(("127.0.0.1", nodes.place.port)) as connection:
            own = json.loads(json.dumps(facts_as_json(tmp_path)))
            connection.sendall(json.dumps({**hello, "facts": own}).encode() + b"\n")
            connection.recv(100)

    thread = threading.Thread(target=leave)
    thread.start()
    found = nodes.examine()
    thread.join()
    assert any("came, but then left" in finding.what for finding in found.findings), found.findings


def facts_as_json(folder: Path) -> Any:
    import msgspec

    return msgspec.to_builtins(facts(folder))


def test_a_head_that_is_not_there_is_an_error_with_the_line_to_type(tmp_path: Path) -> None:
    place = NodePlace(num_nodes=2, head_host="127.0.0.1", port=free_port(), node=1)
    with pytest.raises(MachineError) as caught:
        take_part(place, facts(tmp_path), run_folder=tmp_path, wait_seconds=0.3)
    assert "can't be reached: Connection refused" in caught.value.what and "nc -vz 127.0.0.1" in caught.value.hint
    place = NodePlace(num_nodes=2, head_host="no-such-host.invalid", port=1, node=1)
    with pytest.raises(MachineError) as caught:
        take_part(place, facts(tmp_path), run_folder=tmp_path, wait_seconds=0.3)
    assert caught.value.what == "the host no-such-host.invalid has no address."


def test_a_link_is_measured_and_a_closed_port_is_refused() -> None:
    server = LinkServer("127.0.0.1")
    result = try_link(server.address, stream_seconds=0.02)
    assert not result.problem and result.bytes_per_second > 1e6 and 0 < result.ping_seconds < 1
    server.close()
    assert "refused" in try_link(server.address, stream_seconds=0.02).problem


def test_one_machine_alone(shop: Shop) -> None:
    ended = shop.run("doctor", "job.py")
    assert ended.code == 0 and "nothing is wrong with this machine" in ended.out and "torch 2" in ended.out, ended.text
    found = shop.run("doctor", "--json").json()
    assert found["ok"] and found["num_nodes"] == 1 and found["nodes"]["0"]["cores"] >= 1
    missing = shop.run("doctor", "nowhere.py")
    assert missing.code == 2 and "nowhere.py does not exist" in missing.err, missing.text


def test_a_task_of_srun_that_is_not_the_first_of_its_node_does_nothing(shop: Shop) -> None:
    step = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_NODEID": "0",
        "SLURM_LOCALID": "1", "SLURM_PROCID": "1",
    }  # fmt: skip
    ended = shop.run("doctor", environ=step)
    assert ended.code == 0 and ended.out.strip() == "", ended.text
