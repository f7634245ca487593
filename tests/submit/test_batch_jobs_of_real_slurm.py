"""Batch jobs in a real Slurm, on three network nodes: the scripts that `submit` writes, and one for unlike nodes."""

import re
import shlex
import time
from pathlib import Path

from tests.launch.several_nodes.own_nodes import wait_for_step
from tests.submit.slurm_cluster import SlurmCluster
from tests.submit.slurm_runs import (
    EXACT,
    ON_REAL_SLURM,
    PACELINE,
    check_resumed_where_it_stopped,
    digest,
    handed_in,
    on_one_machine,
    submitted,
)
from tests.waiting import wait_until

pytestmark = ON_REAL_SLURM
PAGE = Path(__file__).parents[2] / "docs" / "submit.md"
BASH_BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def test_a_script_that_is_signalled_saves_is_requeued_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """scancel sends the signal of a time limit at once."""
    run = tmp_path / "run"
    job = submitted(cluster, run, "--train.steps", "600", minutes=30)
    wait_for_step(run, 20, seconds=120)
    cluster.run("scancel", "--signal=USR1", job)
    said = cluster.wait_until_over(job)
    output = (run / "submit" / f"slurm-{job}.out").read_text()
    assert "ExitCode=0:0" in said and "Restarts=1" in said, said + output
    assert "Stopped and saved. Resume: srun --nodes 2 --ntasks-per-node 1 paceline train job.py" in output, output
    check_resumed_where_it_stopped(output)
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


def test_a_script_at_its_time_limit_saves_is_requeued_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm itself signals, three minutes before the end of the shortest limit that `submit` takes."""
    run = tmp_path / "run"
    job = submitted(cluster, run, "--train.steps", "900", minutes=6, pause=0.25)
    said = cluster.wait_until_over(job, seconds=3600)
    output = (run / "submit" / f"slurm-{job}.out").read_text()
    assert "TimeLimit=00:06:00" in said and "JobState=COMPLETED" in said and "Restarts=0" not in said, said + output
    assert "Stopped and saved. Resume" in output and "TIME LIMIT" not in output, output
    check_resumed_where_it_stopped(output)
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 2, "--train.steps", "900")


def test_one_task_of_an_array_is_requeued_and_the_others_go_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The signalled task is the one whose number is also that of the whole array."""
    run = tmp_path / "run"
    words = ["--array", "1-3", "--seed", "{task}", "--train.steps", "400"]
    array = submitted(cluster, run, *words, minutes=30, nodes=1, pause=0.05)
    for number in (1, 2, 3):
        wait_for_step(run / str(number), 20, seconds=120)
    shown = cluster.run("scontrol", "show", "job", array)
    task = re.search(rf"JobId={array} ArrayJobId={array} ArrayTaskId=(\d)", shown)
    assert task is not None, shown
    cluster.run("scancel", "--signal=USR1", f"{array}_{task[1]}")
    said = cluster.wait_until_over(array, seconds=1800)
    restarts = dict(re.findall(r"ArrayTaskId=(\d).*?Restarts=(\d)", said, flags=re.DOTALL))
    assert restarts == {number: "1" if number == task[1] else "0" for number in "123"}, said
    check_resumed_where_it_stopped((run / "submit" / f"slurm-{array}-{task[1]}.out").read_text())
    for number in "123":
        words = ["--seed", number, "--train.steps", "400"]
        assert digest(run / number) == on_one_machine(cluster, tmp_path / f"one-{number}", 1, *words), number


def test_the_documented_script_for_unlike_nodes_is_requeued_and_resumes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A heterogeneous job, of one rank on one node and two on another; scancel signals all of its groups."""
    run, script, output = tmp_path / "run", tmp_path / "job.sh", tmp_path / "slurm.out"
    words = ["--run-dir", str(run), *EXACT, "--train.on_empty", "zero", "--train.steps", "400"]
    (text,) = (block for block in BASH_BLOCK.findall(PAGE.read_text()) if "hetjob" in block)
    for old, new in {
        "--ntasks-per-node=8 --gpus-per-node=8": "--ntasks-per-node=1",
        "--ntasks-per-node=4 --gpus-per-node=4": "--ntasks-per-node=2",
        "runs/unlike-%j.out": str(output),
        "paceline train job.py --run-dir runs/unlike": shlex.join([*PACELINE, "train", "job.py", *words]),
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script.write_text(text)
    job = handed_in(cluster, script, pause=0.05)
    wait_until(lambda: output.exists() and "step 20 " in output.read_text(), seconds=300)
    cluster.run("scancel", "--signal=USR1", job)
    said = cluster.wait_until_over(job, seconds=1800)
    assert said.count("JobState=COMPLETED") == said.count("Restarts=1") == 2, said + output.read_text()
    check_resumed_where_it_stopped(output.read_text())
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 3, "--train.steps", "400")


def test_after_a_node_falls_silent_the_script_is_requeued_on_the_others(cluster: SlurmCluster, tmp_path: Path) -> None:
    """As after a loss of power: nothing tells Slurm, whose own timeout for nodes (300 s) must run out."""
    run = tmp_path / "run"
    job = submitted(cluster, run, "--train.steps", "900", "--checkpoint.every", "10", minutes=30, pause=0.05)
    wait_for_step(run, 20, seconds=120)
    first = cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    lost = 2 if "2" in first else 1
    cluster.nodes.cut(lost)
    try:
        said = cluster.wait_until_over(job, seconds=1800)
    finally:
        cluster.nodes.mend(lost)
    output = (run / "submit" / f"slurm-{job}.out").read_text()
    assert "JobState=COMPLETED" in said and "Restarts=1" in said and f"NodeList={first}" not in said, said + output
    assert "resumed: step-" in output, output
    assert digest(run) == on_one_machine(cluster, tmp_path / "one", 2, "--train.steps", "900")
