"""Which process the rank variables of an environment belong to."""

import os
import subprocess
import sys

import pytest

from paceline.comm.process_group import LaunchInfo
from paceline.launch.inherited_environment import (
    OWNER_VARIABLE,
    attempt_folder,
    drop_inherited,
    mark_rank_variables_as_own,
    own_environ,
)
from paceline.launch.launcher_variables import detect_world
from paceline.launch.rendezvous import adopt_launcher_variables

OURS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711", "PACELINE_LISTEN_FD": "", "PACELINE_ATTEMPT_FOLDER": "/runs/a/logs/attempt-1"}  # fmt: skip
WORLDS = {
    "ours": OURS,
    "torchrun": {**OURS, "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0"},
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1",
             "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "9"},
    "mpirun": {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"))},
    "mpiexec": {"PMI_RANK": "1", "PMI_SIZE": "2"},
}  # fmt: skip


def of_a_child(environ: dict[str, str]) -> dict[str, str]:
    """The same where another process is the rank."""
    found = {**environ, "HOME": "/home/me"}
    mark_rank_variables_as_own(found)
    found[OWNER_VARIABLE] = f"{os.getppid()}:{found[OWNER_VARIABLE].partition(':')[2]}"
    return found


@pytest.mark.parametrize("kind", WORLDS)
def test_a_child_of_a_rank_is_in_no_world(kind: str) -> None:
    environ = {**WORLDS[kind], "HOME": "/home/me"}
    mark_rank_variables_as_own(environ)
    mine = detect_world(environ)
    assert mine is not None and (mine.rank, mine.world_size) == (1, 2)
    child = of_a_child(WORLDS[kind])
    assert detect_world(child) is None and attempt_folder(child) is None
    assert LaunchInfo.read(child) == LaunchInfo()
    drop_inherited(child)
    assert set(child) - {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"} == {"HOME"}


@pytest.mark.parametrize("kind", ["ours", "torchrun"])
def test_what_another_launcher_has_set_since_is_believed(kind: str) -> None:
    child = {**of_a_child(WORLDS[kind]), "RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0",
             "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "inner"}  # fmt: skip
    joined = detect_world(child)
    assert joined is not None and (joined.rank, joined.world_size, joined.kind) == (0, 4, "torchrun")
    assert attempt_folder(child) is None and LaunchInfo.read(child).listen_fd is None
    adopt_launcher_variables(joined, child)
    assert "PACELINE_LISTEN_FD" not in child and "PACELINE_ATTEMPT_FOLDER" not in child
    assert child[OWNER_VARIABLE].startswith(f"{os.getpid()}:") and own_environ(child) is child


def test_an_environment_without_a_mark_is_as_it_is() -> None:
    assert own_environ(OURS) is OURS
    rest = dict(OURS)
    drop_inherited(rest)
    assert rest == OURS


@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_it_is_asked_in_the_process_itself(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    mark_rank_variables_as_own(os.environ)  # monkeypatch takes it out below
    try:
        assert detect_world(os.environ) is not None
        if how == "fork":
            pid = os.fork()
            if pid == 0:
                os._exit(detect_world(os.environ) is not None)
            assert os.waitpid(pid, 0)[1] == 0
        else:
            code = "import os, sys; from paceline.launch.launcher_variables import detect_world; sys.exit(detect_world(os.environ) is not None)"
            assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    finally:
        del os.environ[OWNER_VARIABLE]
