"""What is said of machines that differ, or that lack something."""

from typing import Any

import pytest

from paceline.nodes.fact_findings import judge_facts
from paceline.nodes.finding import distinct_hosts
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
        "host": f"host{number}", "address": address, "interfaces": interfaces,
        "host_address": address, "is_host_address_own": True, "python": "3.12.1", "packages": {"torch": "2.13.0", "numpy": "2.1.0"}, "code": {},
        "data": {}, "command": {}, "variables": {}, "interface_variables": {}, "vector_unit": "AVX-512", "gpus": "", "gpu_driver": "",
        "cores": 8, "free_shared_memory": 8 * GIB, "free_disk": 100 * GIB, "open_files": 65536,
    }  # fmt: skip
    return MachineFacts(**{**values, **changed})


def test_sound_machines_give_no_finding() -> None:
    assert judge_facts({node: machine(node) for node in range(4)}, skews={1: 0.3, 2: -0.9}) == []
    assert judge_facts({0: machine(host_address="127.0.0.1")}) == [], "alone, no other node has to reach it"


@pytest.mark.parametrize(("changed", "says", "blamed"), [
    ({"python": "3.11.2"}, "python differs: 3.12.1 on nodes 0, 2, 3.11.2 on node 1", ()),
    ({"packages": {"torch": "2.12.0"}}, "torch differs: 2.13.0 on nodes 0, 2, 2.12.0 on node 1; so does numpy", ()),
    ({"packages": {"numpy": "2.1.0"}}, "torch differs: 2.13.0 on nodes 0, 2, unset on node 1", ()),
    ({"gpus": "7 x H100", "gpu_driver": "570.1"}, "GPUs differs: none on nodes 0, 2, 7 x H100 on node 1", (1,)),
    ({"variables": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO differs: unset on nodes 0, 2, Ring on node 1", ()),
    ({"data": {"data": "2 files, b"}}, "data differs: unset on nodes 0, 2, 2 files, b on node 1", ()),
    ({"host_address": "", "interfaces": (), "address": ""}, "node 1 (host1): its own name resolves to nothing", (1,)),
    ({"free_shared_memory": 64 << 20}, "node 1 (host1): /dev/shm has 64.0 MiB free", (1,)),
    ({"free_disk": 5 << 20}, "node 1 (host1): 5.0 MiB are free where the run folder is", (1,)),
    ({"open_files": 256}, "node 1 (host1): a process may open only 256 files", (1,)),
    ({"interface_variables": {"NCCL_SOCKET_IFNAME": "ib"}},
     "node 1 (host1): NCCL_SOCKET_IFNAME=ib, but there is only lo, eth0", (1,)),
    ({"interface_variables": {"GLOO_SOCKET_IFNAME": "eth0,eth1"}},
     "node 1 (host1): GLOO_SOCKET_IFNAME=eth0,eth1, but there is only lo, eth0", (1,)),
    ({"interface_variables": {"GLOO_SOCKET_IFNAME": "lo"}},
     "node 1 (host1): GLOO_SOCKET_IFNAME=lo, but no other node reaches that interface", (1,)),
    ({"interface_variables": {"GLOO_SOCKET_IFNAME": "^docker0"}},
     "node 1 (host1): GLOO_SOCKET_IFNAME=^docker0, but gloo takes only names", (1,)),
])  # fmt: skip
def test_a_machine_that_is_unlike_the_others_is_named(
    changed: dict[str, Any], says: str, blamed: tuple[int, ...]
) -> None:
    (finding,) = judge_facts({0: machine(0), 1: machine(1, **changed), 2: machine(2)})
    assert finding.what.startswith(says) and finding.nodes == blamed and finding.hint and not finding.is_note


def test_other_packages_and_files_that_the_training_may_not_use_are_notes() -> None:
    code = {"job.py": "a", "scratch.py": "b"}
    nodes = {
        0: machine(0, code=code),
        1: machine(1, packages={**machine().packages, "ipython": "9"}, code={"job.py": "a"}),
    }
    notes = judge_facts(nodes)
    assert [note.what.partition(" differs")[0] for note in notes] == ["ipython", "scratch.py"]
    assert all(note.is_note for note in notes)
    (finding, missing) = judge_facts({0: machine(0, code=code), 1: machine(1, code={**code, "job.py": "missing"})})
    assert not finding.is_note and finding.what == "job.py differs: a on node 0, missing on node 1"
    assert missing.what == "node 1 (host1): job.py is missing"


@pytest.mark.parametrize("digest", ["missing", "can't be read (Permission denied)"])
def test_what_the_user_named_must_be_there_even_if_it_is_missing_everywhere(digest: str) -> None:
    for named in ({"code": {"job.py": digest}}, {"data": {"data": digest}}):
        (finding,) = judge_facts({0: machine(0, **named), 1: machine(1, **named)})
        assert finding.what.startswith("nodes 0, 1: ") and digest in finding.what and not finding.is_note


@pytest.mark.parametrize(("changed", "says"), [
    ({"host_address": ""}, "its own name resolves to nothing; gloo would listen where no other node reaches it"),
    ({"host_address": "127.0.1.1"}, "its own name resolves to 127.0.1.1; gloo would listen"),
    ({"host_address": "8.8.8.8", "is_host_address_own": False},
     "its own name resolves to 8.8.8.8, which is no address of it; gloo would listen"),
])  # fmt: skip
def test_a_name_that_leads_elsewhere_is_a_note_because_paceline_train_repairs_it(
    changed: dict[str, Any], says: str
) -> None:
    (finding,) = judge_facts({0: machine(0), 1: machine(1, **changed), 2: machine(2)})
    assert finding.is_note and finding.what.startswith(f"node 1 (host1): {says}")
    assert finding.hint.startswith("export GLOO_SOCKET_IFNAME=eth0")


def test_a_name_that_leads_elsewhere_is_said_once_for_all_nodes() -> None:
    own = [Interface(name=name, address=f"10.0.0.{node + 1}", mtu=1500) for node, name in enumerate(("eth0", "ens5"))]
    found = judge_facts(
        {node: machine(node, host_address="127.0.1.1", interfaces=(own[node],)) for node in range(2)}
    )  # the interface that leads to the others has another name on each node
    (finding,) = found
    assert finding.is_note and finding.what.startswith("nodes 0, 1: its own name resolves to 127.0.1.1; gloo would")
    assert finding.hint.startswith("on node 0: export GLOO_SOCKET_IFNAME=eth0 (")
    assert "; on node 1: export GLOO_SOCKET_IFNAME=ens5 (" in finding.hint


def test_another_vector_unit_is_a_note_unless_the_user_has_chosen_the_kernels() -> None:
    (note,) = judge_facts({0: machine(0), 1: machine(1, vector_unit="AVX2")})
    assert note.is_note and note.what == "vector unit differs: AVX-512 on node 0, AVX2 on node 1"
    chosen = {"variables": {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}}
    assert judge_facts({0: machine(0, **chosen), 1: machine(1, vector_unit="AVX2", **chosen)}) == []


def test_of_gpus_only_those_that_are_there_are_compared() -> None:
    """A node without GPUs has no driver that could differ."""
    own = {"gpus": "8 x H100", "gpu_driver": "570.1"}
    (finding,) = judge_facts({0: machine(0, **own), 1: machine(1, **own), 2: machine(2)})
    assert finding.what.startswith("GPUs differs") and finding.nodes == (2,)
    (finding,) = judge_facts(
        {0: machine(0, **own), 1: machine(1, **{**own, "gpu_driver": "560"}), 2: machine(2, **own)}
    )
    assert finding.what.startswith("GPU driver differs") and finding.nodes == (1,)


def test_a_cause_on_several_nodes_is_one_finding_in_the_words_of_the_worst() -> None:
    disks = {node: machine(node, free_disk=(500 + node) << 20) for node in range(3)}
    (finding,) = judge_facts(disks)
    assert finding.what == "nodes 0, 1, 2: at worst, 500.0 MiB are free where the run folder is"
    (finding,) = judge_facts({node: machine(node) for node in range(4)}, skews={1: 5.0, 2: 5.1, 3: 4.9})
    assert finding.what.startswith("node 0 (host0): the clock is -4.9 s off") and finding.nodes == (0,)


@pytest.mark.parametrize(("first", "second"), [
    ({"interface_variables": {"GLOO_SOCKET_IFNAME": "eth9"}}, {"interface_variables": {"GLOO_SOCKET_IFNAME": "lo"}}),
    ({"host_address": "8.8.8.8", "is_host_address_own": False}, {"host_address": ""}),
    ({"code": {"job.py": "missing"}}, {"code": {"job.py": "can't be read (Permission denied)"}}),
])  # fmt: skip
def test_causes_with_other_words_are_findings_of_their_own(first: dict[str, Any], second: dict[str, Any]) -> None:
    found = [
        each for each in judge_facts({0: machine(0), 1: machine(1, **first), 2: machine(2, **second)}) if each.nodes
    ]
    assert [each.nodes for each in found] == [(1,), (2,)] and found[0].what != found[1].what


def test_what_the_job_imports_must_be_equal_and_other_files_beside_it_are_a_note() -> None:
    code = {"job.py": "a", "helper.py": "b", "scratch.py": "c"}
    other = {"job.py": "a", "helper.py": "x", "scratch.py": "y"}
    finding, note = judge_facts({
        0: machine(0, code=code, imported={"helper.py": "b", "lib/a.py": "d"}),
        1: machine(1, code=other, imported={"helper.py": "x"}),
    })  # fmt: skip
    assert finding.what == "helper.py differs: b on node 0, x on node 1; so does lib/a.py" and finding.refusal_code == 2
    assert note.is_note and note.what == "scratch.py differs: c on node 0, y on node 1"


def test_another_command_is_said_alone() -> None:
    """With `paceline doctor` on one node, all options and files of `paceline train` differ, too."""
    (finding,) = judge_facts({
        0: machine(0, verb="paceline train", code={"job.py": "a"}, command={"layout": "ddp"}),
        1: machine(1, verb="paceline doctor"),
    })  # fmt: skip
    assert finding.what == "command differs: paceline train on node 0, paceline doctor on node 1"
    assert finding.refusal_code == 2


def test_another_network_for_the_ranks_is_no_finding() -> None:
    """Many clusters have names on the management network, and NCCL on another one."""
    fabric = Interface(name="ib0", address="192.168.0.1", mtu=4092)
    both = {"interfaces": (*machine().interfaces, fabric), "interface_variables": {"NCCL_SOCKET_IFNAME": "ib0"}}
    assert judge_facts({0: machine(0, **both), 1: machine(0, **both)}) == []


def test_what_is_unknown_is_no_finding() -> None:
    """For example on a Mac."""
    unknown = {"interfaces": (), "free_shared_memory": -1, "free_disk": -1, "open_files": -1,
               "interface_variables": {"GLOO_SOCKET_IFNAME": "en0"}}  # fmt: skip
    assert judge_facts({0: machine(0, **unknown), 1: machine(1, **unknown)}) == []


def test_of_two_machines_none_is_to_blame() -> None:
    (finding,) = judge_facts({0: machine(0), 1: machine(1, gpus="8 x H100", gpu_driver="570.1")})
    assert finding.nodes == () and not finding.is_note


def test_a_clock_that_is_off_is_named() -> None:
    (finding,) = judge_facts({0: machine(0), 1: machine(1), 2: machine(2)}, skews={1: -5.2, 2: 0.1})
    assert finding.what.startswith("node 1 (host1): the clock is -5.2 s off that of the other nodes")


@pytest.mark.parametrize(("variable", "value"), [
    ("NCCL_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "=eth0"), ("NCCL_SOCKET_IFNAME", "^docker0,lo"),
    ("GLOO_SOCKET_IFNAME", "eth0"), ("NCCL_SOCKET_IFNAME", "eth1,eth0"),
])  # fmt: skip
def test_a_variable_that_names_the_right_interface_is_no_finding(variable: str, value: str) -> None:
    assert judge_facts({0: machine(0), 1: machine(1, interface_variables={variable: value})}) == []


def test_a_name_that_resolves_to_itself_is_no_trouble_if_gloo_is_told_the_interface() -> None:
    told = {"host_address": "127.0.1.1", "interface_variables": {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert judge_facts({0: machine(0), 1: machine(1, **told)}) == []


def test_values_that_differ_in_the_same_way_are_one_finding() -> None:
    many = {"absl-py": "1", **{f"torch-{number}": "1" for number in range(30)}, "torch": "2.13.0"}
    (finding, note) = judge_facts(
        {0: machine(0, packages=many), 1: machine(1, packages={}), 2: machine(2, packages=many)}
    )
    assert finding.what.startswith("torch differs") and "and 26 more" in finding.what
    assert note.is_note and note.what.startswith("absl-py differs")


def test_machines_with_one_host_name_are_told_apart_by_their_address() -> None:
    (finding,) = judge_facts(
        {node: machine(node, host="ip-10", free_disk=(9 - 8 * (node == 1)) << 29) for node in range(3)}
    )
    assert finding.what.startswith("node 1 (ip-10 at 10.0.0.2): "), finding.what
    assert distinct_hosts({0: "a", 1: "a"}, {0: "127.0.0.1", 1: "127.0.0.1"}) == {0: "a", 1: "a"}, "one machine"
    assert distinct_hosts({0: "a", 1: "a", 2: "b"}, {1: "10.0.0.2", 2: "10.0.0.3"}) == {
        0: "a",
        1: "a at 10.0.0.2",
        2: "b",
    }
