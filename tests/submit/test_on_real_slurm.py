"""Training in a real Slurm, on three network nodes: with srun alone, and by the script that `submit` writes."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB
from tests.launch.several_nodes.own_nodes import wait_for_step
from tests.submit.slurm_cluster import SlurmCluster, can_run_slurm, slurm_cluster

pytestmark = [
    pytest.mark.soak,
    pytest.mark.one_worker,
    pytest.mark.skipif(not can_run_slurm(), reason="needs root, slurm-wlm and munge"),
]
PACELINE = [sys.executable, "-W", "ignore", "-m", "paceline"]
EXACT = ["--train.exact", "true", "--train.steps", "12", "--watch.to", "console,jsonl"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "job.py").write_text(SMALL_JOB)
    with slurm_cluster(3, folder) as made:
        yield made


def digest(run: Path) -> str:
    return str(json.loads((run / "weights.json").read_text())["digest"])


def on_one_machine(cluster: SlurmCluster, run: Path, ranks: int, *words: str) -> str:
    command = [
        *PACELINE,
        "train",
        "job.py",
        "--ranks",
        str(ranks),
        "--run-dir",
        str(run),
        *EXACT,
        "--train.on_empty",
        "zero",
        *words,
    ]
    done = subprocess.run(command, cwd=cluster.nodes.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return digest(run)


@pytest.mark.parametrize(
    "place",
    [
        ("-N2", "-n4"),
        ("-N2", "-n4", "--mpi=pmi2"),
        ("-N3", "-n4", "-m", "cyclic"),
        ("-N3", "-n4", "-m", "plane=2"),
        ("-N2", "-n3", "-w", "node1,node2"),
    ],
    ids=" ".join,
)
def test_srun_needs_no_address_and_the_weights_are_those_of_one_machine(
    cluster: SlurmCluster, tmp_path: Path, place: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    text = cluster.run("srun", *place, *PACELINE, "train", "job.py", "--run-dir", str(run), *EXACT)
    assert (run / "weights.json").exists(), text
    ranks = int(next(word for word in place if word.startswith("-n"))[2:])
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", ranks)


def test_ranks_in_turn_are_refused_for_a_layout_that_they_would_slow_down(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    words = ["train", "job.py", "--run-dir", str(tmp_path / "run"), "--layout", "tp=2,dp=2"]
    text = cluster.run("srun", "-N2", "-n4", "-m", "cyclic", *PACELINE, *words)
    assert "ranks 0, 1, a group of tp, are on node0, node1" in text and "--distribution=block" in text, text


def test_a_step_inside_a_job_of_more_nodes_trains_on_its_own_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    step = ["srun", "-N2", "-n2", "-w", "node1,node2", *PACELINE, "train", "job.py", "--run-dir", str(run), *EXACT]
    text = cluster.run("salloc", "-N3", *step)
    assert (run / "weights.json").exists(), text
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 2)


def test_one_agent_on_each_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train", "job.py", "--ranks-per-node", "2", "--run-dir", str(run), *EXACT]
    text = cluster.run("srun", "-N2", "--ntasks-per-node=1", *PACELINE, *words)
    assert "starting 4 processes on 2 nodes" in text and "node 1 of 2, with ranks 2-3" in text, text
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 4)


def submitted(cluster: SlurmCluster, run: Path, *words: str, minutes: float) -> str:
    """Write the script for two nodes, hand it in, and return the number of the job."""
    command = [
        *PACELINE, "submit", "job.py", "--nodes", "2", "--ranks-per-node", "1", "--device", "cpu", "--run-dir", str(run),
        "--hours", str(minutes / 60), "--train.exact", "true", "--watch.to", "console,jsonl", "--train.on_empty", "zero", *words,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=cluster.nodes.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    script = run / "submit" / "job.sh"
    text = script.read_text()
    job = re.search(r"Submitted batch job (\d+)", cluster.run("sbatch", str(script)))
    assert job is not None and "--signal=USR1@180" in text
    return job[1]


def test_a_script_that_is_signalled_saves_is_requeued_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The signal of a time limit would come after minutes; scancel sends the same one."""
    run = tmp_path / "run"
    job = submitted(cluster, run, "--train.steps", "600", minutes=30)
    wait_for_step(run, 20, seconds=120)
    cluster.run("scancel", "--signal=USR1", job)
    said = cluster.wait_until_over(job)
    output = (run / "submit" / f"slurm-{job}.out").read_text()
    assert "ExitCode=0:0" in said and "Restarts=1" in said, said + output
    assert "Stopped and saved. Resume" in output and "resumed: step-" in output, output
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 2, "--train.steps", "600")


def test_after_the_loss_of_a_node_the_script_is_requeued_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """With Slurm's own timeout for nodes (300 s), the script ends first, with 75 because of the lost node."""
    run = tmp_path / "run"
    job = submitted(cluster, run, "--train.steps", "900", "--checkpoint.every", "10", minutes=30)
    wait_for_step(run, 20, seconds=120)
    nodes = cluster.run("squeue", "-h", "-j", job, "-o", "%N")
    lost = 2 if "2" in nodes else 1
    cluster.nodes.kill(lost)
    time.sleep(10)
    cluster.start_daemon(lost, "slurmd", "-D", "-N", f"node{lost}")
    said = cluster.wait_until_over(job, seconds=500)
    output = (run / "submit" / f"slurm-{job}.out").read_text()
    assert "ExitCode=0:0" in said and "Restarts=1" in said, said + output
    assert "resumed: step-" in output, output
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 2, "--train.steps", "900")
