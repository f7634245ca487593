"""Open MPI and MPICH start the ranks on two real networks; a script stands for ssh."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB
from tests.nodes.network_nodes import NetworkNodes, can_make_nodes, network_nodes
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.one_worker,
    pytest.mark.skipif(not can_make_nodes(), reason="network namespaces need root"),
]
WORDS = ["--train.exact", "true", "--train.on_empty", "zero", "--watch.to", "console,jsonl"]
_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
number=${1#node}
shift
exec ip netns exec PREFIX-"$number" unshare --uts --mount --propagation private sh -c '
hostname "$0"
mount --bind HOSTS /etc/hosts
exec sh -c "$*"' "node$number" "$@"
"""
OPEN_MPI = [
    "mpirun.openmpi", "--allow-run-as-root", "--mca", "plm_rsh_agent", "SHELL", "--mca", "oob_tcp_if_include", "eth0",
    "-H", "node0:2,node1:2", "-np", "4", "-x", "MASTER_ADDR=node0", "-x", "MASTER_PORT=23456", "-x", "PAUSE",
]  # fmt: skip
MPICH = [
    "mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", "SHELL", "-hosts", "node0,node1", "-ppn", "2", "-n", "4",
    "-genv", "MASTER_ADDR", "node0", "-genv", "MASTER_PORT", "23457",
]  # fmt: skip


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkNodes]:
    folder = tmp_path_factory.mktemp("mpi")
    (folder / "job.py").write_text(SMALL_JOB)
    with network_nodes(2, folder) as made:
        yield made


def start(
    nodes: NetworkNodes, launcher: list[str], run: Path, *words: str, pause: float = 0
) -> "subprocess.Popen[str]":
    """Start a training of 4 ranks on node 0, with both of the nodes."""
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    shell = nodes.folder / "shell"
    shell.write_text(_SHELL.replace("PREFIX", nodes.prefix).replace("HOSTS", str(nodes.hosts)))
    shell.chmod(0o755)
    command = [*(str(shell) if word == "SHELL" else word for word in launcher), sys.executable, "-W", "ignore", "-m"]
    train = ["paceline", "train", "job.py", "--run-dir", str(run), *WORDS, *words]
    environ = {"CUDA_VISIBLE_DEVICES": "", "PAUSE": str(pause)}
    return nodes.start(0, [*command, *train], environ=environ)


def digest(run: Path) -> str:
    return str(json.loads((run / "weights.json").read_text())["digest"])


def on_one_machine(nodes: NetworkNodes, run: Path, steps: int) -> str:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "paceline",
        "train",
        "job.py",
        "--ranks",
        "4",
        "--run-dir",
        str(run),
    ]
    done = subprocess.run(
        [*command, *WORDS, "--train.steps", str(steps)], cwd=nodes.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return digest(run)


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=["Open MPI", "MPICH"])
def test_mpi_on_two_networks_trains_and_stops_as_one_machine(
    nodes: NetworkNodes, tmp_path: Path, launcher: list[str]
) -> None:
    run, log = tmp_path / "run", tmp_path / "run" / "logs" / "attempt-1" / "rank-0.log"
    process = start(nodes, launcher, run, "--train.steps", "300", pause=0.05)
    wait_until(lambda: log.exists() and "step 20 " in log.read_text(), seconds=300)
    process.send_signal(signal.SIGUSR1)
    output = "\n".join(process.communicate(timeout=300))
    line = "Resume: with the same hosts, MASTER_ADDR and MASTER_PORT: mpi"
    assert process.returncode == 75 and line in output, output
    process = start(nodes, launcher, run, "--train.steps", "300")
    output = "\n".join(process.communicate(timeout=300))
    assert process.returncode == 0 and "resumed: step-" in output, output
    assert digest(run) == on_one_machine(nodes, tmp_path / "one", 300)
