"""A training on two real networks, whose ranks meet by the plain variables of torch."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB
from tests.nodes.network_nodes import NetworkNodes, can_make_nodes, network_nodes

pytestmark = [
    pytest.mark.one_worker,
    pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root: tests/launch uses loopback"),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkNodes]:
    folder = tmp_path_factory.mktemp("training")
    (folder / "job.py").write_text(SMALL_JOB)
    with network_nodes(2, folder) as made:
        yield made


def train(
    nodes: NetworkNodes, run: str, *words: str, port: int, hosts: tuple[str, str] = ("", "")
) -> list[tuple[int, str]]:
    """The exit code and the output of the command on each node. `hosts` has their /etc/hosts."""
    processes = []
    for node in range(2):
        environ = {
            "RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node0",
            "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--run-dir", run, *words]
        processes.append(nodes.start(node, [*command, "--train.steps", "12"], environ=environ, hosts=hosts[node]))
    outputs = ["\n".join(process.communicate(timeout=60)) for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_nodes_whose_own_names_resolve_to_127_0_1_1_train_as_one_machine(nodes: NetworkNodes, tmp_path: Path) -> None:
    """The default of Debian and Ubuntu, with which gloo alone does not connect."""
    own = [f"127.0.0.1 localhost\n127.0.1.1 node{node}\n" for node in range(2)]
    hosts = (f"{own[0]}{nodes.address(1)} node1\n", f"{own[1]}{nodes.address(0)} node0\n")
    ended = train(nodes, str(tmp_path / "run"), "--train.threads", "1", port=29603, hosts=hosts)
    assert [code for code, _ in ended] == [0, 0], ended
    one = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "paceline", "train", "job.py", "--ranks", "2", "--run-dir",
         str(tmp_path / "one"), "--train.threads", "1", "--train.steps", "12"],
        cwd=nodes.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert one.returncode == 0, one.stderr
    digests = {json.loads((tmp_path / run / "weights.json").read_text())["digest"] for run in ("run", "one")}
    assert len(digests) == 1


def test_the_machine_of_a_lost_rank_is_named(nodes: NetworkNodes, tmp_path: Path) -> None:
    ended = train(nodes, str(tmp_path / "run"), "--faults", "kill rank=1 step=6", port=29601)
    assert ended[1][0] == -9 and ended[0][0] == 1, ended
    says = "rank 0 stopped at step 6 because the connection to node1 (10.83.0.2, rank 1) was lost; the output there may say why"
    assert says in ended[0][1], ended


def test_after_a_node_that_did_not_come_the_hint_is_the_doctor(nodes: NetworkNodes, tmp_path: Path) -> None:
    environ = {
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
        "MASTER_PORT": "29602", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    words = ["train", "job.py", "--run-dir", str(tmp_path / "run"), "--train.timeout_seconds", "2"]
    process = nodes.start(0, [sys.executable, "-W", "ignore", "-m", "paceline", *words], environ=environ)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 3 and "on every node: paceline doctor --nodes N:node0" in err, err


@pytest.mark.parametrize("node", [0, 1])
def test_a_head_with_only_an_ipv6_address_is_refused_in_words(nodes: NetworkNodes, tmp_path: Path, node: int) -> None:
    """At once, although the machine has the address: the nodes would wait in vain for each other."""
    words = ["train", "job.py", "--run-dir", str(tmp_path / "run"), "--nodes", "2:node6", "--node", str(node)]
    process = nodes.start(
        node,
        [sys.executable, "-W", "ignore", "-m", "paceline", *words],
        hosts="127.0.0.1 localhost\nfd77::1 node6\n",
        setup="ip addr add fd77::1/64 dev eth0 nodad",
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "the host node6 has only an IPv6 address (fd77::1), and the nodes meet over IPv4." in err
    assert "to do: --nodes 2:ADDRESS with an IPv4 address of node6: ip -4 addr, there" in err
