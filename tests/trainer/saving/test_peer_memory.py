"""Checkpoints in the memory of several nodes: what is sent, what is refused, and what is used after a loss."""

import http.client
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint, step_name
from paceline.checkpoint.files.peers.memory_server import MemoryEndpoint, MemoryServer
from paceline.checkpoint.files.peers.peer_checkpoint import NO_STEP, PeerPlan
from paceline.checkpoint.files.peers.peer_files import PeerFiles, fetch_file, write_endpoint
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError
from paceline.events import CheckpointRefused, Event
from paceline.filesystem.run_lock import LOCK
from paceline.launch.memory_disk import LOCKED_RUN, remove_abandoned_memory_folders
from paceline.launch.several_nodes.node_memory import NodeMemory
from paceline.launch.several_nodes.peer_checkpoint_search import PeerCheckpointSearch
from paceline.trainer.saving.memory.peer_memory import PeerMemory, find_peer_checkpoint
from tests.trainer.saving.test_background_thread import STATE, files_of
from tests.waiting import wait_until

EVERY = "checkpoint.memory_every"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MemoryServer]:
    server = MemoryServer(tmp_path / "memory", host="127.0.0.1")
    yield server
    server.close()


def ask(server: MemoryServer, method: str, path: str, *, token: str | None = None, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.endpoint.port, timeout=20)
    key = server.endpoint.token if token is None else token
    connection.request(method, path, body, {"Authorization": f"Bearer {key}"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_file_is_written_and_read_by_those_with_the_token(server: MemoryServer, tmp_path: Path) -> None:
    path = "/step-00000012/model.rank-0001.safetensors"
    assert ask(server, "PUT", path, body=b"abc", token="guess") == 403
    assert ask(server, "PUT", path, body=b"abc", token="") == 403
    assert not list((tmp_path / "memory").iterdir()), "a stranger has written"
    assert ask(server, "PUT", path, body=b"abc") == 201
    assert (tmp_path / "memory" / path[1:]).read_bytes() == b"abc"
    assert ask(server, "GET", path, token="guess") == 403
    assert ask(server, "GET", path) == 200
    assert ask(server, "GET", "/step-00000012/other") == 404


@pytest.mark.parametrize(
    "path",
    ["/../outside", "/step-00000012/../../outside", "/step-00000012/.hidden", "/step-1/a", "/run", "/step-00000012/a/b",
     "//etc/passwd", "/step-00000012/%2e%2e", "/step-00000012/"],
)  # fmt: skip
def test_a_path_outside_a_checkpoint_is_refused(server: MemoryServer, tmp_path: Path, path: str) -> None:
    assert ask(server, "PUT", path, body=b"abc") == 404
    assert ask(server, "GET", path) == 404
    assert [entry.name for entry in tmp_path.rglob("*")] == ["memory"]


def test_half_a_file_never_appears(server: MemoryServer, tmp_path: Path) -> None:
    head = (
        f"PUT /step-00000012/a HTTP/1.1\r\nAuthorization: Bearer {server.endpoint.token}\r\nContent-Length: 9\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=20) as connection:
        connection.sendall(head.encode() + b"half")
        connection.shutdown(socket.SHUT_WR)
        assert b" 507 " in connection.recv(100)
    assert not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]


def test_a_file_without_a_length_or_without_room_is_refused(
    server: MemoryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = f"PUT /step-00000012/a HTTP/1.1\r\nAuthorization: Bearer {server.endpoint.token}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=20) as connection:
        connection.sendall(head.encode())
        assert b" 411 " in connection.recv(100)
    monkeypatch.setattr("paceline.filesystem.disk_full.free_bytes", lambda _: 0)
    write_endpoint(tmp_path, 1, server.endpoint)
    (tmp_path / "step-00000012").mkdir()
    file = tmp_path / "step-00000012" / "a"
    file.write_bytes(bytes(8 << 20))
    with pytest.raises(SaveError, match=r"node 1 did not take a copy of a: .* are free"):
        PeerFiles(tmp_path, timeout_seconds=20).send(1, file)


def test_a_file_that_ends_early_is_not_taken_for_whole(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = MemoryEndpoint(host="127.0.0.1", port=listener.getsockname()[1], token="t")
        with pytest.raises(http.client.IncompleteRead):
            fetch_file(endpoint, tmp_path / "a", timeout_seconds=20)
        thread.join()
    assert not list(tmp_path.iterdir())


class Nodes:
    """Nodes with one rank each, in this process. Each rank writes a tensor of its own."""

    def __init__(self, folder: Path, count: int, *, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("paceline.launch.memory_disk.MEMORY_DISK", folder)
        self.folder, self.count = folder, count
        self.memories = [NodeMemory() for _ in range(count)]
        for number, memory in enumerate(self.memories):
            memory.begin_attempt(node=number, host="127.0.0.1", plan=PeerPlan(nodes=tuple(range(count))))
            memory.announce(folder, node=number)
        self.ranks = [
            PeerMemory(
                Path(memory.folder),
                world=World(rank=number, world_size=count, timeout_seconds=20),
                plan=PeerPlan(nodes=tuple(range(count)), node=number),
                files=PeerFiles(folder, timeout_seconds=20),
                num_copies=copies,
                attempt=1,
            )
            for number, memory in enumerate(self.memories)
        ]

    def write(self, step: int) -> None:
        for number, rank in enumerate(self.ranks):
            tensor = replace(files_of(step)["model.safetensors"][0], name=f"weight.{number}")
            rank.write(step=step, files={f"model.rank-{number:04d}.safetensors": [tensor]}, state=STATE)
        for rank in self.ranks:
            rank._thread.wait()

    def lose(self, number: int) -> None:
        """Replace a node by one that has nothing in its memory."""
        self.memories[number].close()
        self.memories[number] = NodeMemory()

    def plan(self, *lost: int, disk: Path | None = None) -> PeerPlan:
        """The plan of the next attempt, after the loss of some nodes."""
        checkpoints = PeerCheckpointSearch()
        checkpoints.own = self.memories[0]
        for number, memory in enumerate(self.memories):
            checkpoints.record(number, memory.inventory())
        for number in lost:
            checkpoints.forget(number)
            self.lose(number)
        plan = checkpoints.plan(range(self.count), checkpoints=disk or self.folder / "none", request={"payload": {}})
        assert plan is not None
        for number, memory in enumerate(self.memories):
            memory.begin_attempt(node=number, host="127.0.0.1", plan=plan)
            memory.announce(self.folder, node=number)
        return plan

    def path(self, number: int, name: str, *, step: int = 3) -> Path:
        """A file in the memory of a node."""
        return Path(self.memories[number].folder) / step_name(step) / name

    def open(self, number: int, plan: PeerPlan) -> tuple[OpenCheckpoint | None, list[Event]]:
        return find_peer_checkpoint(
            Path(self.memories[number].folder),
            replace(plan, node=number),
            PeerFiles(self.folder, timeout_seconds=20),
            world=World(rank=number, world_size=self.count),
        )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for memory in self.memories:
            memory.close()


def values(opened: OpenCheckpoint | None) -> dict[str, bytes]:
    assert opened is not None
    return {name: bytes(tensor.data) for name, tensor in opened.files["model.safetensors"].items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


@pytest.mark.parametrize("lost", [1, 2])
def test_the_files_of_a_lost_node_come_from_the_node_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    nodes = Nodes(folder, 3, copies=1, monkeypatch=monkeypatch)
    for step in (3, 6, 9):
        nodes.write(step)
    plan = nodes.plan(lost)
    assert plan.step == 9
    assert lost not in plan.sources[f"model.rank-{lost:04d}.safetensors"]
    for number in range(3):
        opened, events = nodes.open(number, plan)
        assert events == []
        assert values(opened) == {f"weight.{rank}": bytes([9]) * 40 for rank in range(3)}
    nodes.close()
    assert not [path for path in folder.iterdir() if path.is_dir()], "memory is left"


def test_a_node_reads_only_the_files_that_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 3, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    plan = nodes.plan(1)
    opened, _ = nodes.open(1, plan)
    assert opened is not None
    there = nodes.path(1, "")
    assert {path.name for path in there.glob("model.*")} == set()
    assert bytes(opened.files["model.safetensors"]["weight.1"].data) == bytes([3]) * 40
    assert {path.name for path in there.glob("model.*")} == {"model.rank-0001.safetensors"}
    nodes.close()


def test_what_is_too_much_lost_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = Nodes(folder, 4, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    assert nodes.plan(1, 2) == PeerPlan(nodes=(0, 1, 2, 3)), "node 2 had the only copy of node 1's files"
    assert capsys.readouterr().err == "", "it is no error that a checkpoint is not complete"
    nodes.close()


def test_two_copies_survive_the_loss_of_two_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 4, copies=2, monkeypatch=monkeypatch)
    nodes.write(3)
    assert nodes.plan(1, 2).step == 3
    nodes.close()


def test_an_unfinished_checkpoint_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    tensor = files_of(6)["model.safetensors"][0]
    nodes.ranks[0].write(step=6, files={"model.rank-0000.safetensors": [tensor]}, state=STATE)
    nodes.ranks[0]._thread.wait()
    assert nodes.plan().step == 3
    nodes.close()


def test_a_newer_checkpoint_on_disk_is_preferred(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    nodes.write(6)
    (tmp_path / "disk" / "step-00000006").mkdir(parents=True)
    (tmp_path / "disk" / "latest").write_text("step-00000006\n")
    assert nodes.plan(disk=tmp_path / "disk").step == NO_STEP
    nodes.close()


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()  # it is a link to a slot
    if kind == "flipped":
        path.write_bytes(content)


DAMAGES = {
    "flipped": "weight.1 in model.rank-0001.safetensors differs from what was written.",
    "gone": "model.rank-0001.safetensors of step-00000003 could not be read from another node (node 0: it answers 404 "
    "Not Found).",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_only_copy_is_refused_with_its_reason_if_it_is_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    plan = nodes.plan(1)
    damage(nodes.path(0, "model.rank-0001.safetensors"), kind)
    opened, events = nodes.open(0, plan)
    assert opened is None
    assert [event.reason for event in events if isinstance(event, CheckpointRefused)] == [DAMAGES[kind]]
    assert nodes.plan().step == NO_STEP, "it is not tried again"
    nodes.close()


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_file_is_replaced_by_the_copy_of_another_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    nodes = Nodes(folder, 3, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    plan = nodes.plan()
    damage(nodes.path(number, f"model.rank-{number:04d}.safetensors"), kind)
    opened, events = nodes.open(number, plan)
    assert events == [] and values(opened) == {f"weight.{rank}": bytes([3]) * 40 for rank in range(3)}
    nodes.close()


def test_a_second_loss_finds_no_file_that_was_only_planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 4, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    first = nodes.plan()
    again = nodes.plan()
    assert again == first and again.sources["model.rank-0002.safetensors"] == (2, 3)
    assert nodes.plan(1, 2).step == NO_STEP
    nodes.close()


def test_a_node_that_has_waited_keeps_nothing_that_the_plan_does_not_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(folder, 3, copies=0, monkeypatch=monkeypatch)
    nodes.write(3)
    sources = {"manifest.json": (0,), "model.rank-0000.safetensors": (0,), "model.rank-0001.safetensors": (1,)}
    plan = PeerPlan(nodes=(0, 1, 2), step=3, sources=sources)
    for number, memory in enumerate(nodes.memories):
        memory.begin_attempt(node=number, host="127.0.0.1", plan=plan)
    assert [nodes.path(number, "").is_dir() for number in range(3)] == [True, True, False]
    nodes.close()


@pytest.mark.parametrize("dead", [1, 2])
def test_the_head_asks_each_node_that_has_a_copy(folder: Path, monkeypatch: pytest.MonkeyPatch, dead: int) -> None:
    nodes = Nodes(folder, 4, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    server = nodes.memories[dead]._server
    assert server is not None
    server.close()  # the node is dead, and nobody has noticed yet; the next one has a copy
    assert nodes.plan().step == 3
    nodes.close()


@pytest.mark.parametrize("request_", [{"servers": 1, "payload": {}}, {"payload": {"settings": {EVERY: 0}}}])
def test_an_attempt_that_saves_nothing_in_memory_opens_no_port(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any]
) -> None:
    monkeypatch.setattr("paceline.launch.memory_disk.MEMORY_DISK", folder)
    checkpoints = PeerCheckpointSearch()
    plan = checkpoints.plan([0, 1], checkpoints=folder, request=request_)
    assert plan is None
    assert checkpoints.own.begin_attempt(node=0, host="127.0.0.1", plan=plan) == ""
    assert checkpoints.own.inventory() is None and not list(folder.iterdir())


@pytest.mark.parametrize("kind", ["no disk", "no lock", "no address"])
def test_a_node_without_memory_says_so_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    def fail(_: Path) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("paceline.launch.memory_disk.MEMORY_DISK", folder / "none" if kind == "no disk" else folder)
    if kind == "no lock":
        monkeypatch.setattr("paceline.launch.several_nodes.node_memory.lock_memory_folder", fail)
    memory, plan = NodeMemory(), PeerPlan(nodes=(0, 1))
    host = "203.0.113.1" if kind == "no address" else "127.0.0.1"
    for _ in range(2):
        assert memory.begin_attempt(node=1, host=host, plan=plan) == ""
    assert memory.inventory() is None and memory.folder == "" and not list(folder.iterdir())
    assert capsys.readouterr().err.count("no checkpoints in memory, because node 1 has none: ") == 1
    memory.close()
    world = World(rank=1, world_size=2)
    found = find_peer_checkpoint(None, replace(plan, node=1, step=3), PeerFiles(folder, timeout_seconds=1), world=world)
    assert found == (None, [])


def test_all_ranks_leave_what_one_of_them_can_not_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    plan = nodes.plan()
    monkeypatch.setattr(World, "gather_json", lambda _, own: [own, "the other rank has a damaged file."])
    opened, events = nodes.open(0, plan)
    assert opened is None
    assert [getattr(event, "reason", "") for event in events] == ["the other rank has a damaged file."]
    assert nodes.open(1, plan) == (None, [])
    nodes.close()


def test_an_attempt_begins_with_nothing_but_its_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    for step in (3, 6):
        nodes.write(step)
    assert nodes.plan().step == 6
    for memory in nodes.memories:
        names = sorted(path.name for path in Path(memory.folder).iterdir())
        assert names == sorted([LOCK, LOCKED_RUN, "step-00000006"])
    nodes.close()


def test_a_rank_of_an_earlier_attempt_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    nodes.write(3)
    late, file = PeerFiles(folder, timeout_seconds=20), Path(nodes.memories[0].folder) / "step-00000003" / "late"
    file.write_bytes(b"late")
    late.send(1, file)
    assert nodes.plan().step == 3
    with pytest.raises(SaveError, match="403"):
        late.send(1, file)
    nodes.close()


def test_a_file_that_arrives_after_its_attempt_is_left_out(server: MemoryServer, tmp_path: Path) -> None:
    head = (
        f"PUT /step-00000012/a HTTP/1.1\r\nAuthorization: Bearer {server.endpoint.token}\r\nContent-Length: 9\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.endpoint.port), timeout=20) as connection:
        connection.sendall(head.encode() + b"half")
        wait_until(lambda: bool(list((tmp_path / "memory").rglob(".incoming*"))))
        server.begin_attempt()
        connection.sendall(b" more")
        assert b" 507 " in connection.recv(100)
    assert not [path for path in (tmp_path / "memory").rglob("*") if path.is_file()]


def test_a_head_that_was_alone_is_reached_by_those_that_come(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.memory_disk.MEMORY_DISK", folder)
    memory, plan = NodeMemory(), PeerPlan(nodes=(0,))
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.2"):
        own = memory.begin_attempt(node=0, host=host, plan=plan)
        memory.announce(folder, node=0)
        (folder / "step-00000003").mkdir(exist_ok=True)
        (folder / "step-00000003" / "a").write_bytes(b"abc")
        PeerFiles(folder, timeout_seconds=20).send(0, folder / "step-00000003" / "a")
        assert (Path(own) / "step-00000003" / "a").read_bytes() == b"abc"
        inventory = memory.inventory()
        assert inventory is not None and inventory.endpoint.host == host
    memory.close()


def test_strangers_leave_room_for_those_who_know_the_token(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ("127.0.0.1", server.endpoint.port)
    strangers = [socket.create_connection(address, timeout=20) for _ in range(300)]
    closed = 0
    for stranger in strangers[256:]:
        with suppress(ConnectionError):
            closed += stranger.recv(1) == b""
    for stranger in strangers:
        stranger.close()
    assert closed > 20, "more than 256 are kept"
    wait_until(lambda: ask(server, "PUT", "/step-00000012/a", body=b"abc") == 201)


def test_two_checkpoints_are_kept_on_each_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    for step in range(1, 6):
        nodes.write(step)
    for memory in nodes.memories:
        assert sorted(path.name for path in Path(memory.folder).glob("step-*")) == ["step-00000004", "step-00000005"]
    nodes.close()


def test_a_neighbour_that_takes_nothing_is_said_at_the_next_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    nodes.write(1)
    nodes.lose(1)
    tensor = files_of(2)["model.safetensors"]
    nodes.ranks[0].write(step=2, files={"model.rank-0000.safetensors": tensor}, state=STATE)
    with pytest.raises(CheckpointError, match=r"node 1 did not take a copy of model.rank-0000.safetensors: "):
        nodes.ranks[0].write(step=3, files={"model.rank-0000.safetensors": tensor}, state=STATE)
    nodes.close()


def test_the_memory_of_a_killed_node_is_removed_by_the_next_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(folder, 2, copies=1, monkeypatch=monkeypatch)
    remove_abandoned_memory_folders()
    assert all(Path(memory.folder).is_dir() for memory in nodes.memories), "it is in use"
    os.close(nodes.memories[1]._lock)  # as the kernel does when a process ends
    remove_abandoned_memory_folders()
    assert [Path(memory.folder).is_dir() for memory in nodes.memories] == [True, False]
    nodes.memories[1]._lock = os.open("/dev/null", os.O_RDONLY)
    nodes.close()
