"""Launcher environments: whose numbers count, local ranks, and where ranks without an address meet."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.common.resume_command import build_resume_command
from paceline.config.task import Task
from paceline.errors import MachineError, UsageError
from paceline.filesystem.run_lock import this_process
from paceline.launch import rendezvous as meet
from paceline.launch.launcher_variables import JoinedWorld, detect_world
from paceline.trainer.script_restart import script_command

SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


def found(environ: dict[str, str]) -> tuple[Any, ...]:
    joined = detect_world(environ)
    assert joined is not None
    return joined.kind, joined.rank, joined.world_size, joined.local_rank, joined.local_world_size, joined.is_one_node


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("pmi", [{}, {"PMI_RANK": "rank", "PMI_SIZE": "4", "PMI_FD": "11", "PMI_JOBID": "77.0"}])
def test_a_task_of_srun_has_the_place_that_slurm_gives_it(rank: int, pmi: dict[str, str]) -> None:
    """`srun --mpi=pmi2` says rank and size twice, and the place on the node only as Slurm does."""
    own = {**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2), "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}  # fmt: skip
    told = {name: str(rank) if value == "rank" else value for name, value in pmi.items()}
    assert found(own | told) == ("srun", rank, 4, rank % 2, 2, False)


def test_nodes_of_a_step_may_have_other_numbers_of_tasks() -> None:
    own = {**SLURM, "SLURM_NTASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS_PER_NODE": "2"}
    places = [(0, 0, 0, 2), (5, 1, 2, 2), (6, 0, 3, 1)]
    for rank, local, node, size in places:
        task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        assert found(own | task)[3:5] == (local, size)


def test_ranks_of_mpiexec_in_an_allocation_are_no_tasks_of_srun() -> None:
    """Hydra starts one helper on each node by srun; its ranks inherit the helper's numbers."""
    helper = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
    own = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert found(helper | own) == ("mpiexec", 3, 4, 1, 2, False)


@pytest.mark.parametrize("names", [("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")])  # fmt: skip
def test_each_mpiexec_says_the_place_on_the_node_in_its_own_words(names: tuple[str, str]) -> None:
    assert found({"PMI_RANK": "3", "PMI_SIZE": "4", names[0]: "1", names[1]: "2"})[3:5] == (1, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MASTER_ADDR": "node0"},
        {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0"},
    ],
)
def test_a_local_rank_that_nobody_says_is_not_the_global_one(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="does not give the local rank of rank 3 of 4"):
        detect_world(environ)
    one = {name: value for name, value in environ.items() if name != "MASTER_ADDR"} | {"MASTER_ADDR": "127.0.0.1"}
    assert found(one)[3:] == (3, 4, True)  # no other machine can be meant


UUID = "2b97ee30-fe5e-4d4b-9fed-d58b7de3a392"
OF_NODE_1 = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
OF_ONE_NODE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
MET = {"MASTER_ADDR": "node0", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (OF_ONE_NODE | MET, "torchrun --nproc-per-node 2 -m x"),
        (OF_ONE_NODE | MET | {"TORCHELASTIC_RUN_ID": UUID}, "torchrun --standalone --nproc-per-node 2 -m x"),
        (
            OF_ONE_NODE | MET | {"TORCHELASTIC_RUN_ID": UUID, "TORCHELASTIC_MAX_RESTARTS": "10"},
            "torchrun --standalone --max-restarts 10 --nproc-per-node 2 -m x",
        ),
        (OF_ONE_NODE | MET | {"TORCHELASTIC_MAX_RESTARTS": "0"}, "torchrun --nproc-per-node 2 -m x"),
        (
            OF_ONE_NODE | MET | {"TORCHELASTIC_MAX_RESTARTS": "5", "PACELINE_TORCHRUN_BACKEND": "1"},
            "torchrun --rdzv-backend=paceline --max-restarts 5 --nproc-per-node 2 -m x",
        ),
        (
            OF_NODE_1 | MET | {"TORCHELASTIC_MAX_RESTARTS": "3"},
            "on each node, with its own --node-rank: torchrun --nnodes 2 --node-rank 1 --master-addr node0 "
            "--master-port 29400 --max-restarts 3 --nproc-per-node 2 -m x",
        ),
        (
            OF_NODE_1 | MET,
            "on each node, with its own --node-rank: torchrun --nnodes 2 --node-rank 1 --master-addr node0 "
            "--master-port 29400 --nproc-per-node 2 -m x",
        ),
        (
            OF_NODE_1 | MET | {"WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "3"},
            "on each node, with its own --node-rank: torchrun --nnodes 3 --node-rank 1 --master-addr node0 "
            "--master-port 29400 --nproc-per-node 2 -m x",
        ),
        (OF_NODE_1 | MET | {"TORCHELASTIC_RUN_ID": "7"}, "the same torchrun command on each node, with: -m x"),
        (
            {**OF_NODE_1, **MET, "GROUP_RANK": "", "NODE_RANK": ""},
            "the same torchrun command on each node, with: -m x",
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "with the same hosts: mpiexec -n 4 -m x"),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
             "MASTER_ADDR": "node0", "MASTER_PORT": "29400"},
            "with the same hosts, MASTER_ADDR and MASTER_PORT: mpiexec -n 4 -m x",
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "mpiexec -n 4 -m x"),
        (
            {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            "srun --ntasks 4 -m x",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "in each of the 2 processes, with its variables (RANK, ...): -m x"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "-m x"),
    ],
)  # fmt: skip
def test_the_line_that_resumes_starts_the_whole_world(environ: dict[str, str], line: str) -> None:
    """A line without how the nodes meet would start a world of one node that resumes alone."""
    joined = detect_world(environ)
    assert joined is not None and joined.launch_command(["-m", "x"]) == line
    layout = "single" if joined.world_size == 1 else "ddp"
    task = Task(verb="train", job="job.py", run="runs/a", ranks=joined.world_size, layout=layout)
    words = "paceline train job.py --run-dir runs/a"
    assert build_resume_command(task, joined) == line.replace("-m x", f"-m {words}" if "torchrun" in line else words)
    again = script_command(joined, command=["python", "own.py"], change="")
    assert again == line.replace("-m x", "own.py" if "torchrun" in line else "python own.py")


def test_the_line_that_resumes_agents_of_srun_names_none_of_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may have other nodes, and another port."""
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[2-3]")
    task = Task(verb="train", job="job.py", run="r", ranks=8, layout="ddp", nodes="2:gpu2:20070")
    line = "srun --nodes 2 --ntasks-per-node 1 paceline train job.py --run-dir r --ranks-per-node 4"
    assert build_resume_command(task) == line
    for nodes in ("1:2:gpu2", "2:gpu7"):  # these need the option
        chosen = build_resume_command(replace(task, nodes=nodes))
        assert chosen == f"on every node: paceline train job.py --run-dir r --nodes {nodes} --ranks-per-node 4"


def world(rank: int, **more: Any) -> JoinedWorld:
    told = {"RANK": str(rank), "WORLD_SIZE": "3"}
    joined = detect_world(told | more)
    assert joined is not None
    return joined


def test_a_world_finds_no_word_of_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meet.tempfile, "gettempdir", lambda: str(tmp_path))
    ports = []
    for _ in range(3):
        environs: list[dict[str, str]] = [{}, {}, {}]
        meet.adopt_launcher_variables(world(0), environs[0])
        for rank in (1, 2):
            meet.adopt_launcher_variables(world(rank), environs[rank])
        assert len({environ["MASTER_PORT"] for environ in environs}) == 1
        assert all(environ["GLOO_SOCKET_IFNAME"] == "lo" for environ in environs)
        ports.append(environs[0]["MASTER_PORT"])
        assert list(tmp_path.glob("paceline-*/*")) == []  # the last one that heard it has removed it
        os.close(int(environs[0]["PACELINE_LISTEN_FD"]))


def test_the_word_of_a_process_that_is_gone_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meet.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(meet, "_WAIT_SECONDS", 0.1)
    folder = meet._rendezvous_folder(world(1))
    folder.mkdir()
    for holder in ({**this_process(), "born": "1"}, {**this_process(), "pid": 2**22 + 1}, {}, None, 7):
        (folder / "invitation.json").write_text(json.dumps({"port": 9, "holder": holder}))
        with pytest.raises(MachineError, match="rank 0 did not publish its address"):
            meet.adopt_launcher_variables(world(1), {})
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        born = (Path("/proc") / str(other.pid) / "stat").read_text().rpartition(")")[2].split()[19]
        holder = {**this_process(), "pid": other.pid, "born": born}
        (folder / "invitation.json").write_text(json.dumps({"port": 9, "holder": holder}))
        with pytest.raises(UsageError, match=f"process {other.pid} is waiting for the other ranks"):
            meet.adopt_launcher_variables(world(0), {})
    finally:
        other.communicate(b"\n")
    environ: dict[str, str] = {}
    meet.adopt_launcher_variables(world(0), environ)
    os.close(int(environ["PACELINE_LISTEN_FD"]))


def test_ranks_meet_whatever_wraps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper around each rank is its parent, and each has its own."""
    named = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-1@1"}
    joined = [detect_world(named), detect_world({"RANK": "1", "WORLD_SIZE": "2"})]
    folders = []
    for parent in (100, 200):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        folders.append([meet._rendezvous_folder(one) for one in joined if one is not None])
    assert folders[0] == folders[1] and len(set(folders[0])) == 2
    other = detect_world({**named, "PMIX_NAMESPACE": "prterun-1@2"})
    assert other is not None and meet._rendezvous_folder(other) != folders[0][0]


@pytest.mark.parametrize(
    ("environ", "lo"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host"}, True),
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host"}, False),
    ],
)
def test_ranks_of_one_machine_listen_on_loopback_alone(
    environ: dict[str, str], lo: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meet, "resolve_host", lambda _: "10.0.0.1")
    monkeypatch.setattr(meet, "is_own_address", lambda _: True)
    joined = detect_world({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", **environ})
    assert joined is not None
    found: dict[str, str] = {}
    meet.adopt_launcher_variables(joined, found)
    assert ("GLOO_SOCKET_IFNAME" in found) is lo
    kept = {"GLOO_SOCKET_IFNAME": "eth7"}
    meet.adopt_launcher_variables(joined, kept)
    assert kept["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(("own_address", "is_own", "interface", "found"), [
    ("10.0.0.1", True, "eth0", None), ("127.0.1.1", True, "eth0", "eth0"), ("", False, "eth0", "eth0"),
    ("8.8.8.8", False, "eth0", "eth0"), ("127.0.1.1", True, "", None),
])  # fmt: skip
def test_across_machines_gloo_listens_where_others_reach_it(
    own_address: str, is_own: bool, interface: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, gloo listens at the address of the own host name."""
    monkeypatch.setattr(meet, "resolve_host", lambda _: own_address)
    monkeypatch.setattr(meet, "is_own_address", lambda _: is_own)
    monkeypatch.setattr(meet, "interface_towards", lambda head: interface if head == "host" else "wrong")
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    joined = detect_world({**ranks, "MASTER_ADDR": "host", "MASTER_PORT": "1"})
    assert joined is not None
    environ: dict[str, str] = {}
    meet.adopt_launcher_variables(joined, environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == found


def test_a_step_over_several_nodes_says_where_its_ranks_meet() -> None:
    """A step may have fewer tasks and other nodes than its job; the first task is on the step's first node."""
    step = {
        **SLURM, "SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "gpu[2-3]", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[1-3]",
    }  # fmt: skip
    world = detect_world(step)
    assert world is not None and (world.rank, world.world_size, world.local_world_size) == (2, 3, 1)
    assert world.address == "gpu2" and world.port is not None and 20000 <= world.port < 29000
    other = detect_world({**step, "SLURM_STEP_ID": "1"})
    assert other is not None and other.port != world.port
    given = detect_world({**step, "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert given is not None and (given.address, given.port) == ("head", 1234)
