"""Which node a process is: from the options, or from the variables of a Slurm step."""

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.nodes.node_place import PLAYED_NODES, has_late_names, node_place, split_counts
from paceline.nodes.slurm_hosts import expand_hosts

STEP = {
    "SLURM_JOB_ID": "10", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[2-3]", "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[1-3]", "SLURM_LOCALID": "0",
}  # fmt: skip


@pytest.mark.parametrize(("text", "hosts"), [
    ("login", ["login"]),
    ("node[1-3,07]", ["node1", "node2", "node3", "node07"]),
    ("gpu-[001-003,010],login", ["gpu-001", "gpu-002", "gpu-003", "gpu-010", "login"]),
    ("rack[1-2]n[1-2]", ["rack1n1", "rack1n2", "rack2n1", "rack2n2"]),
    ("a,b[8-10]", ["a", "b8", "b9", "b10"]),
])  # fmt: skip
def test_hosts_of_a_step(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_options_say_where_the_nodes_meet() -> None:
    place = node_place("3:host1", None, {})
    assert place is not None and (place.num_nodes, place.head_host, place.port, place.node) == (3, "host1", 29400, None)
    place = node_place("3:host1:1234", 2, {})
    assert place is not None and (place.port, place.node) == (1234, 2)


@pytest.mark.parametrize(("environ", "node"), [
    ({**STEP, "PET_NODE_RANK": "2"}, 1),
    ({"SLURM_NODEID": "1"}, None),  # a batch script: no task of srun
    ({"PET_NODE_RANK": "2"}, 2),
    ({"JOB_COMPLETION_INDEX": "1"}, 1),
])  # fmt: skip
def test_a_scheduler_says_which_node_it_is(environ: dict[str, str], node: int | None) -> None:
    place = node_place("3:host1", None, environ)
    assert place is not None and place.node == node
    place = node_place("3:host1", 0, environ)
    assert place is not None and place.node == 0, "the option counts more"


def test_a_step_of_slurm_needs_no_options_and_its_first_node_is_the_head() -> None:
    """The first node of the job is not in this step."""
    place = node_place(None, None, STEP)
    assert place is not None and (place.num_nodes, place.head_host, place.node) == (2, "gpu2", 1)
    assert not place.is_extra_task
    for nodes in (None, "2:gpu2"):
        second = node_place(nodes, None, {**STEP, "SLURM_LOCALID": "3"})
        assert second is not None and second.is_extra_task
    other = node_place(None, None, {**STEP, "SLURM_STEP_ID": "1"})
    assert other is not None and other.port != place.port
    alone = node_place(None, None, {**STEP, "SLURM_STEP_NODELIST": "gpu2"})
    assert alone is not None and alone.num_nodes == 1
    assert node_place(None, None, {}) is None


@pytest.mark.parametrize(("nodes", "node", "environ", "says"), [
    ("3", None, {}, "--nodes 3 can't be read"),
    ("host1:3", None, {}, "can't be read"),
    ("0:host1", None, {}, "at least one node"),
    ("4:2:host1", None, {}, "the smaller number comes first"),
    ("2:host1:99999", None, {}, "the port is 1 to 65535"),
    ("2:host1", 2, {}, "has the number 2, but there are 2 nodes"),
    ("2:[fd77::1]", None, {}, "--nodes 2:[fd77::1]: the nodes meet over IPv4, and this is an IPv6 address"),
    ("2:[fd77::1]:29400", 0, {}, "the nodes meet over IPv4"),
    ("2:4:fd77:0:0:0:0:0:0:1", 0, {}, "the nodes meet over IPv4"),
    ("2:::1", 0, {}, "the nodes meet over IPv4"),
    (None, 1, {}, "--node needs --nodes"),
    (None, 1, STEP, "--node needs --nodes"),
    (None, None, {**STEP, "SLURM_NODEID": "x"}, "srun set variables that can't be read"),
])  # fmt: skip
def test_what_can_not_be_read_is_refused(
    nodes: str | None, node: int | None, environ: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        node_place(nodes, node, environ)
    assert says in caught.value.what


@pytest.mark.parametrize("nodes", ["host1", "2::host1", "2:4:a:b"])
def test_the_refusal_lists_all_forms(nodes: str) -> None:
    with pytest.raises(UsageError) as caught:
        node_place(nodes, None, {})
    for form in ("N or MIN:MAX", "plays the nodes on this machine", "N:HOST,", "N:HOST:PORT", "MIN:MAX:HOST or",
                 "MIN:MAX:HOST:PORT"):  # fmt: skip
        assert form in caught.value.cause


@pytest.mark.parametrize("nodes", ["3", "2:4"])
def test_numbers_without_a_host_are_refused_with_a_host(nodes: str) -> None:
    with pytest.raises(UsageError, match="a host is needed") as caught:
        node_place(nodes, None, {})
    assert caught.value.hint == f"--nodes {nodes}:host1"


def test_names_come_late_only_under_a_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr("paceline.nodes.node_place._SAGEMAKER_FILE", file)
    assert not has_late_names({"SLURM_NODEID": "1", "PATH": "/bin"})
    for environ in (STEP, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"JOB_COMPLETION_INDEX": "0"}):
        assert has_late_names(environ)
    file.touch()
    assert has_late_names({})


def test_a_place_that_is_played_has_no_host_in_its_option() -> None:
    place = node_place("2:4:127.0.0.1:1234", 0, {PLAYED_NODES: "4"})
    assert place is not None and place.option == "2:4" and split_counts("2:4") == ("2:4", 4)
