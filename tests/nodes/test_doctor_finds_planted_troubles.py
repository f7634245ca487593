"""`paceline doctor --nodes 3:node0` on three real networks, with one trouble planted in each case.

Every finding names the node, and one trouble gives one finding.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.nodes.network_nodes import ENVIRON, NETWORK, NetworkNodes, can_make_nodes, ip, network_nodes

pytestmark = [
    pytest.mark.one_worker,
    pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root: test_examination.py uses loopback"),
]
PORT = 29455


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkNodes]:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "job.py").write_text("x = 1\n")
    (folder / "changed").mkdir()
    (folder / "changed" / "job.py").write_text("x = 2\n")
    (folder / "data").mkdir()
    (folder / "data" / "part-0").write_text("1234")
    (folder / "less").mkdir()
    (folder / "less" / "part-0").write_text("123")
    old = folder / "old" / "torch-2.12.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n")
    (folder / "runs").mkdir()
    (folder / "full").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "full", str(folder / "full")], check=True)
    try:
        with network_nodes(3, folder) as made:
            yield made
    finally:
        subprocess.run(["umount", "--lazy", str(folder / "full")], check=True)


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A trouble on one node, and what must be said of it, as a regular expression."""

    says: str
    node: int | None = 1
    options: list[str] = field(default_factory=list)
    """More options for this node, or for all if `node` is None."""
    start: dict[str, Any] = field(default_factory=dict)
    """Arguments of `NetworkNodes.start` for this node, or for all."""
    before: Callable[[NetworkNodes], None] = lambda _: None
    after: Callable[[NetworkNodes], None] = lambda _: None
    absent: tuple[int, ...] = ()
    """Nodes on which nobody types the command."""
    is_note: bool = False
    blamed: tuple[str, ...] | None = None
    """The hosts to exclude; None if that does not matter."""


def firewall(action: str) -> Callable[[NetworkNodes], None]:
    def plant(nodes: NetworkNodes) -> None:
        rules = ["-i", "eth0", "-p", "tcp", "--syn", "--dport", "1024:65535", "-j", action]
        nodes.run_inside(1, "iptables", "-A", "INPUT", *rules)

    return plant


def no_firewall(nodes: NetworkNodes) -> None:
    nodes.run_inside(1, "iptables", "-F")


def separate(nodes: NetworkNodes) -> None:
    """Let the switch drop all packets between nodes 1 and 2."""
    for node, other in ((1, 2), (2, 1)):
        ip("-n", nodes.bridge, "link", "set", f"port{node}", "type", "bridge_slave", "isolated", "on")
        address = nodes.address(other)
        nodes.run_inside(
            node, "ip", "neigh", "replace", address, "lladdr", nodes.mac(other), "dev", "eth0", "nud", "permanent"
        )


def join_again(nodes: NetworkNodes) -> None:
    for node, other in ((1, 2), (2, 1)):
        ip("-n", nodes.bridge, "link", "set", f"port{node}", "type", "bridge_slave", "isolated", "off")
        nodes.run_inside(node, "ip", "neigh", "del", nodes.address(other), "dev", "eth0")


def set_mtu(nodes: NetworkNodes, size: int) -> None:
    nodes.run_inside(1, "ip", "link", "set", "eth0", "mtu", str(size))


def large_packets(nodes: NetworkNodes) -> None:
    """Let nodes 0 and 1 send packets of 9000 bytes, which the port of node 1 at the switch drops."""
    for node in (0, 1, 2):
        nodes.run_inside(node, "ip", "link", "set", "eth0", "mtu", "9000")
    for node in (0, 2):
        ip("-n", nodes.bridge, "link", "set", f"port{node}", "mtu", "9000")


def small_packets(nodes: NetworkNodes) -> None:
    for node in (0, 1, 2):
        nodes.run_inside(node, "ip", "link", "set", "eth0", "mtu", "1500")
        ip("-n", nodes.bridge, "link", "set", f"port{node}", "mtu", "1500")


HOSTS = f"127.0.0.1 localhost\n{NETWORK}.1 node0\n"
PLANTS = {
    "another version of torch": Plant(
        says=r"torch differs: .*2\.12\.1 on node 1", start={"environ": {"PYTHONPATH": "old"}}, blamed=()
    ),
    "another job file": Plant(says=r"job\.py differs: \w+ on nodes 0, 2, \w+ on node 1", options=["changed/job.py"]),
    "other data": Plant(
        says=r"data differs: 1 files, \w+ on nodes 0, 2, 1 files, \w+ on node 1",
        start={"setup": "mount --bind less data"},
    ),
    "a variable of MKL": Plant(says=r"MKL_CBWR differs: unset on nodes 0, 2, AVX2 on node 1",
                               start={"environ": {"MKL_CBWR": "AVX2"}}),
    "its own name is 127.0.1.1": Plant(
        says=r"node 1 \(node1\): its own name resolves to 127\.0\.1\.1; gloo would listen.*"
        r"export GLOO_SOCKET_IFNAME=eth0",
        start={"hosts": f"{HOSTS}127.0.1.1 node1\n"}, is_note=True, blamed=(),
    ),
    "the head's own name is 127.0.1.1": Plant(
        says=r"node 0 \(node0\): its own name resolves to 127\.0\.1\.1.*export GLOO_SOCKET_IFNAME=eth0", node=0,
        start={"hosts": f"127.0.0.1 localhost\n127.0.1.1 node0\n{NETWORK}.2 node1\n{NETWORK}.3 node2\n"}, is_note=True,
    ),
    "its own name is nothing": Plant(
        says=r"node 1 \(node1\): its own name resolves to nothing", start={"hosts": HOSTS}, is_note=True
    ),
    "an interface that is not there": Plant(
        says=r"node 1 \(node1\): GLOO_SOCKET_IFNAME=eth7, but there is only lo, eth0",
        start={"environ": {"GLOO_SOCKET_IFNAME": "eth7"}},
    ),
    "the loopback interface": Plant(
        says=r"GLOO_SOCKET_IFNAME=lo, but no other node reaches that interface", start={"environ": {"GLOO_SOCKET_IFNAME": "lo"}}
    ),
    "NCCL's spelling": Plant(
        says=r"GLOO_SOCKET_IFNAME=\^docker0, but gloo takes only names",
        start={"environ": {"GLOO_SOCKET_IFNAME": "^docker0"}},
    ),
    "a run folder of its own": Plant(
        says=r"node 1 \(node1\): what node 0 writes to the run folder \(/.*/runs\) is not there",
        start={"setup": "mount -t tmpfs own runs"}, blamed=("node1",),
    ),
    "a run folder that is read-only": Plant(
        says=r"node 1 \(node1\): the run folder \(runs\) can't be written: Read-only file system",
        start={"setup": "mount --bind runs runs; mount -o remount,ro,bind runs"},
    ),
    "a full disk that all share": Plant(
        says=r"nodes 0, 1, 2: [\d.]+ MiB are free where the run folder is", node=None, options=["--run-dir", "full"],
        blamed=(),
    ),
    "a small /dev/shm": Plant(
        says=r"node 1 \(node1\): /dev/shm has 16\.0 MiB free", start={"shared_memory": "16m"}, blamed=("node1",)
    ),
    "few open files": Plant(says=r"node 1 \(node1\): a process may open only 256 files", start={"setup": "ulimit -n 256"}),
    "packets between two nodes are dropped": Plant(
        says=r"between node 1 \(node1\) and node 2 \(node2\): no answer to a connection", before=separate,
        after=join_again, blamed=(),
    ),
    "a firewall drops": Plant(
        says=r"node 1 \(node1\): no answer to a connection.*a firewall drops packets",
        before=firewall("DROP"), after=no_firewall,
    ),
    "a firewall rejects": Plant(
        says=r"node 1 \(node1\): connection refused.*a firewall rejects", before=firewall("REJECT"), after=no_firewall
    ),
    "another MTU": Plant(
        says=r"MTU differs: 1500 on nodes 0, 2, 9000 on node 1",
        before=lambda nodes: set_mtu(nodes, 9000), after=lambda nodes: set_mtu(nodes, 1500),
    ),
    "a switch with smaller packets": Plant(
        says=r"node 1 \(node1\) is connected, but only small messages arrive.*lower the MTU", before=large_packets,
        after=small_packets,
    ),
    "a slow link": Plant(
        says=r"all links of node 1 \(node1\): slow: [\d.]+ MiB/s", before=lambda nodes: nodes.slow(1, "20mbit"),
        after=lambda nodes: nodes.fast(1), blamed=("node1",),
    ),
    "a node that is not there": Plant(says=r"node 2 did not come within 4 s", node=None, options=["--wait", "4"],
                                      absent=(2,)),
    "a number twice": Plant(
        says=r"node[12] says that it is node 2, and so does node[12]", options=["--node", "2", "--wait", "4"],
    ),
    "another number of nodes": Plant(
        says=r"node1 expects 2 nodes, and the head 3", options=["--nodes", f"2:node0:{PORT}", "--wait", "4"],
    ),
}  # fmt: skip


def examine(nodes: NetworkNodes, plant: Plant) -> tuple[dict[str, Any], dict[int, tuple[int, str, str]]]:
    """What node 0 found, and how the command ended on each node."""
    processes: dict[int, subprocess.Popen[str]] = {}
    for node in (0, 1, 2):
        if node in plant.absent:
            continue
        is_planted = plant.node in (None, node)
        own = plant.options if is_planted else []
        job = [] if own[:1] == ["changed/job.py"] else ["job.py"]
        waits = [] if "--wait" in own or plant.node is None else ["--wait", "4"] if "--wait" in plant.options else []
        number = [] if "--node" in own else ["--node", str(node)]
        where = [] if "--nodes" in own else ["--nodes", f"3:node0:{PORT}"]
        words = [*job, *own, *where, *number, *waits, "--data", "data", "--json"]
        if "--run-dir" not in own:
            words += ["--run-dir", "runs"]
        command = [sys.executable, "-m", "paceline", "doctor", *words]
        processes[node] = nodes.start(node, command, **(plant.start if is_planted else {}))
    ends = {}
    for node, process in processes.items():
        out, err = process.communicate(timeout=120)
        ends[node] = (process.returncode, out, err)
    return json.loads(ends[0][1]), ends


@pytest.mark.parametrize("name", PLANTS)
def test_it_is_named_once_and_every_node_ends_alike(nodes: NetworkNodes, name: str) -> None:
    plant = PLANTS[name]
    if name.startswith("a firewall") and shutil.which("iptables", path=ENVIRON["PATH"]) is None:
        pytest.skip("iptables is not installed")
    plant.before(nodes)
    try:
        found, ends = examine(nodes, plant)
    finally:
        plant.after(nodes)
    said = [f"{finding['what']}: {finding['hint']}" for finding in found["findings"]]
    assert any(re.search(plant.says, line) for line in said), (said, ends)
    assert len(said) == 1, said
    assert {code for code, _, _ in ends.values()} == {0 if plant.is_note else 3}, ends
    if plant.blamed is not None:
        assert tuple(found["exclude"]) == plant.blamed


def test_sound_nodes_are_sound(nodes: NetworkNodes) -> None:
    found, ends = examine(nodes, Plant(says="", node=None))
    assert found["ok"] and found["findings"] == [] and {code for code, _, _ in ends.values()} == {0}, ends
    assert len(found["links"]) == 6 and all(link["bytes_per_second"] > 20e6 for link in found["links"])
    assert [found["nodes"][str(node)]["host"] for node in range(3)] == ["node0", "node1", "node2"]
    assert not list((nodes.folder / "runs").iterdir()), "no probe is left"


def test_without_a_number_they_are_numbered_as_they_come(nodes: NetworkNodes) -> None:
    words = ["doctor", "--nodes", f"3:node0:{PORT}", "--run-dir", "runs", "--json"]
    processes = [nodes.start(node, [sys.executable, "-m", "paceline", *words]) for node in (0, 1, 2)]
    outs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    found = json.loads(outs[0])
    assert found["nodes"]["0"]["host"] == "node0"
    assert sorted(found["nodes"][node]["host"] for node in ("1", "2")) == ["node1", "node2"]
