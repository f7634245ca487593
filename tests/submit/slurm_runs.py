"""Runs of the small job in a real Slurm, and the run on one machine to which their weights are compared."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.submit.slurm_cluster import SlurmCluster, can_run_slurm

ON_REAL_SLURM = [
    pytest.mark.soak,
    pytest.mark.one_worker,
    pytest.mark.skipif(not can_run_slurm(), reason="needs root, slurm-wlm and munge"),
]
PACELINE = [sys.executable, "-W", "ignore", "-m", "paceline"]
EXACT = ["--train.exact", "true", "--train.steps", "12", "--watch.to", "console,jsonl"]


def digest(run: Path) -> str:
    return str(json.loads((run / "weights.json").read_text())["digest"])


def on_one_machine(cluster: SlurmCluster, run: Path, ranks: int, *words: str) -> str:
    """The digest of the same training on one machine, without a disturbance."""
    command = [
        *PACELINE, "train", "job.py", "--ranks", str(ranks), "--run-dir", str(run), *EXACT, "--train.on_empty", "zero", *words,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=cluster.nodes.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return digest(run)


def submitted(cluster: SlurmCluster, run: Path, *words: str, minutes: float, nodes: int = 2, pause: float = 0) -> str:
    """Write the script, hand it in, and return the number of the job. `pause` is in seconds for each step."""
    command = [
        *PACELINE, "submit", "job.py", "--nodes", str(nodes), "--ranks-per-node", "1", "--device", "cpu", "--run-dir", str(run),
        "--hours", str(minutes / 60), "--train.exact", "true", "--watch.to", "console,jsonl", "--train.on_empty", "zero", *words,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=cluster.nodes.folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    script = run / "submit" / "job.sh"
    assert "--signal=USR1@180" in script.read_text()
    return handed_in(cluster, script, pause=pause)


def handed_in(cluster: SlurmCluster, script: Path, *, pause: float = 0) -> str:
    """Hand a script in, and return the number of the job."""
    said = cluster.run("env", f"PAUSE={pause}", "sbatch", str(script))
    job = re.search(r"Submitted batch job (\d+)", said)
    assert job is not None, said
    return job[1]


def check_resumed_where_it_stopped(output: str) -> None:
    """Check that each start after the first begins with the step at which all ranks had stopped."""
    stopped = [int(step) for step in re.findall(r"^stopped at step (\d+)", output, flags=re.MULTILINE)]
    resumed = [int(step) for step in re.findall(r"^resumed: step-(\d+)", output, flags=re.MULTILINE)]
    assert stopped and stopped == resumed, output
