"""What is said of machines that differ, or that lack something."""

from typing import Any

import pytest

from paceline.nodes.fact_findings import judge_facts
from paceline.nodes.machine_facts import MachineFacts
from paceline.nodes.network_interfaces import Interface

GIB = 1 << 30


def machine(number: int = 0, **changed: Any) -> MachineFacts:
    """A sound machine."""
    address = f"10.0.0.{number + 1}"
    interfaces = (
        Interface(name="lo", address="127.0.0.1", mtu=65536), Interface(name="eth0", address=address, mtu=1500),
    )  # fmt: skip
    values: dict[str, Any] = {
        "host": f"host{number}", "address": address, "interface": "eth0", "interfaces": interfaces,
        "host_address": address, "python": "3.12.1", "packages": {"torch": "2.13.0", "numpy": "2.1.0"}, "code": {},
        "data": {}, "variables": {}, "interface_variables": {}, "vector_unit": "AVX-512", "gpus": (), "gpu_driver": "",
        "cores": 8, "free_shared_memory": 8 * GIB, "free_disk": 100 * GIB, "open_files": 65536,
        "run_folder_problem": "",
    }  # fmt: skip
    return MachineFacts(**{**values, **changed})


def test_sound_machines_give_no_finding() -> None:
    assert judge_facts({node: machine(node) for node in range(4)}, skews={1: 0.3, 2: -0.9}) == []
    assert judge_facts({0: machine(host_address="127.0.0.1")}) == [], "alone, no other node has to reach it"


@pytest.mark.parametrize(("changed", "says", "blamed"), [
    ({"python": "3.11.2"}, "python differs: 3.12.1 on nodes 0, 2, 3.11.2 on node 1", (1,)),
    ({"packages": {"torch": "2.12.0"}}, "numpy differs: 2.1.0 on nodes 0, 2, unset on node 1 (so do torch)", (1,)),
    ({"vector_unit": "AVX2"}, "vector unit differs: AVX-512 on nodes 0, 2, AVX2 on node 1", (1,)),
    ({"gpus": ("H100", "H100")}, "list of GPUs differs: none on nodes 0, 2, H100, H100 on node 1", (1,)),
    ({"gpu_driver": "570.1"}, "GPU driver differs: none on nodes 0, 2, 570.1 on node 1", (1,)),
    ({"variables": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO differs: unset on nodes 0, 2, Ring on node 1", (1,)),
    ({"free_shared_memory": 1 << 20}, "node 1 (host1): /dev/shm has 1.0 MiB free", (1,)),
    ({"free_disk": 5 << 20}, "node 1 (host1): 5.0 MiB are free where the run folder is", (1,)),
    ({"open_files": 256}, "node 1 (host1): a process may open only 256 files", (1,)),
    ({"run_folder_problem": "Permission denied"}, "node 1 (host1): the run folder can't be written: Permission denied",
     (1,)),
    ({"host_address": ""}, "node 1 (host1): its own name resolves to nothing", (1,)),
    ({"host_address": "127.0.1.1"}, "node 1 (host1): its own name resolves to 127.0.1.1, where gloo would listen", (1,)),
    ({"interface_variables": {"NCCL_SOCKET_IFNAME": "ib"}}, "node 1 (host1): NCCL_SOCKET_IFNAME=ib, but it has lo, eth0",
     (1,)),
])  # fmt: skip
def test_a_machine_that_is_unlike_the_others_is_named(changed: dict[str, Any], says: str, blamed: tuple[int]) -> None:
    (finding,) = judge_facts({0: machine(0), 1: machine(1, **changed), 2: machine(2)})
    assert finding.what.startswith(says) and finding.nodes == blamed and finding.hint


def test_of_two_machines_the_head_is_taken_to_be_right() -> None:
    (finding,) = judge_facts({0: machine(0), 1: machine(1, python="3.11.2")})
    assert finding.nodes == (1,)


def test_a_clock_that_is_off_is_named() -> None:
    (finding,) = judge_facts({0: machine(0), 1: machine(1)}, skews={1: -5.2})
    assert finding.what.startswith("node 1 (host1): its clock is -5.2 s off that of node 0")


@pytest.mark.parametrize(("variable", "value"), [
    ("NCCL_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "=eth0"), ("NCCL_SOCKET_IFNAME", "^docker0,lo"),
    ("GLOO_SOCKET_IFNAME", "eth0"), ("GLOO_SOCKET_IFNAME", "eth1,eth0"),
])  # fmt: skip
def test_a_variable_that_names_the_right_interface_is_no_finding(variable: str, value: str) -> None:
    assert judge_facts({0: machine(0), 1: machine(1, interface_variables={variable: value})}) == []


def test_a_name_that_resolves_to_itself_is_no_trouble_if_gloo_is_told_the_interface() -> None:
    told = {"host_address": "127.0.1.1", "interface_variables": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert judge_facts({0: machine(0), 1: machine(1, **told)}) == []


def test_values_that_differ_in_the_same_way_are_one_finding() -> None:
    many = {f"package-{number}": "1" for number in range(30)}
    (finding,) = judge_facts({0: machine(0, packages=many), 1: machine(1, packages={}), 2: machine(2, packages=many)})
    assert "package-0 differs" in finding.what and "and 25 more" in finding.what
