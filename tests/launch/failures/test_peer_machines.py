"""An error of gloo has the address of a peer, and the message has its host and its ranks."""

import socket

import pytest

from paceline.launch.failures.peer_machines import PeerMachines, this_machine

MACHINES = [
    {"host": "node0", "addresses": ["10.0.0.1"]},
    {"host": "node1", "addresses": ["192.168.0.2", "10.0.0.2"]},
    {"host": "node1", "addresses": ["192.168.0.2", "10.0.0.2"]},
]


@pytest.mark.parametrize(("message", "says"), [
    ("[/torch/pair.cc:547] Connection closed by peer [10.0.0.2]:41718", "node1 (10.0.0.2, ranks 1, 2)"),
    ("Read error [10.0.0.1]:29500: Connection reset by peer", "node0 (10.0.0.1, rank 0)"),
    ("SocketImpl(fd=3, addr=[10.0.0.1]:1, remote=[10.0.0.2]:2): timed out", "node1 (10.0.0.2, ranks 1, 2)"),
    ("Connection closed by peer [10.0.0.9]:1", ""),
    ("Application timeout caused pair closure", ""),
])  # fmt: skip
def test_the_machine_in_a_message(message: str, says: str) -> None:
    machines = PeerMachines()
    machines.record(MACHINES)
    assert machines.describe(message) == says
    machines.record([])
    assert machines.describe(message) == ""


def test_this_machine_itself_is_not_named() -> None:
    machines = PeerMachines()
    machines.record([{"host": socket.gethostname(), "addresses": ["10.0.0.1"]}, MACHINES[1]])
    assert machines.describe("Connection closed by peer [10.0.0.1]:1") == ""


def test_of_many_ranks_only_the_first_are_named() -> None:
    machines = PeerMachines()
    machines.record([{"host": "a", "addresses": ["10.0.0.1"]}] * 16)
    assert machines.describe("[10.0.0.1]:1") == "a (10.0.0.1, ranks 0, 1, 2, 3, 4, 5, 6, 7, ...)"


def test_the_loopback_address_is_that_of_every_machine() -> None:
    assert all(not address.startswith("127.") for address in this_machine()["addresses"]) and this_machine()["host"]


def test_machines_with_one_host_name_are_two() -> None:
    machines = PeerMachines()
    own = this_machine()
    other = {"host": own["host"], "addresses": ["198.51.100.7", "172.17.0.9"]}
    machines.record([own, other, other])
    assert (
        machines.describe("Connection closed by peer [198.51.100.7]:1") == f"{own['host']} (198.51.100.7, ranks 1, 2)"
    )
    assert machines.hosts[0] != machines.hosts[1] == machines.hosts[2] == f"{own['host']} at 198.51.100.7"
    for address in own["addresses"]:
        assert machines.describe(f"Connection closed by peer [{address}]:1") == ""
