"""Training in a real Slurm, on three network nodes, with srun alone."""

from pathlib import Path

import pytest

from tests.submit.slurm_cluster import SlurmCluster
from tests.submit.slurm_runs import EXACT, ON_REAL_SLURM, PACELINE, digest, on_one_machine

pytestmark = ON_REAL_SLURM


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


def test_a_step_with_other_numbers_of_tasks_on_each_node(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A heterogeneous job: one task on one node, and two on another."""
    run = tmp_path / "run"
    command = [*PACELINE, "train", "job.py", "--run-dir", str(run), *EXACT]
    text = cluster.run("srun", "-N1", "-n1", *command, ":", "-N1", "-n2", *command)
    assert (run / "weights.json").exists(), text
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 3)


def test_agents_with_other_numbers_of_ranks_are_refused(cluster: SlurmCluster, tmp_path: Path) -> None:
    command = [*PACELINE, "train", "job.py", "--run-dir", str(tmp_path / "run"), *EXACT, "--ranks-per-node"]
    text = cluster.run("srun", "-N1", "-n1", *command, "1", ":", "-N1", "-n1", *command, "2")
    assert "ranks per node differs: 1 on node 0, 2 on node 1" in text, text
