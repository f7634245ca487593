"""Training in a real Ray cluster of this machine, by the script that `submit --to ray` writes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.conftest import SMALL_JOB, Shop

pytestmark = [
    pytest.mark.soak,
    pytest.mark.one_worker,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'"),
]
STEPS, PAUSE = 400, "0.1"
EXACT = [
    "--train.exact", "true", "--train.threads", "1", "--train.steps", str(STEPS), "--log.every", "1",
    "--watch.to", "console,jsonl", "--train.on_empty", "zero",
]  # fmt: skip
SAVED_ONLY_WHEN_ASKED = ["--checkpoint.every", "1000000", "--eval.every", "1000000"]


class RayCluster:
    """The cluster of `ray_cluster.py`, and the trainings in it."""

    def __init__(self, folder: Path, num_cpus: int) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.submit.ray_cluster", str(num_cpus)],
            env=Shop.environ({"PAUSE": PAUSE}),  # which the workers of Ray inherit
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._read_line().removeprefix("address ")

    def do(self, line: str) -> None:
        """Have a node added, drained or removed."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._read_line() == "done"

    def environ(self) -> dict[str, str]:
        return Shop.environ({"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": self.address, "PAUSE": PAUSE})

    def start(self, run: str, *words: str) -> "subprocess.Popen[str]":
        """Write the script, and start it as Ray would: its output is in a file beside the run folder."""
        made = subprocess.run(
            Shop.command("submit", "job.py", "--to", "ray", "--device", "cpu", "--run-dir", run, *words, *EXACT),
            cwd=self.folder, env=self.environ(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        with (self.folder / f"{run}.out").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(self.folder / run / "submit" / "ray_job.py")],
                cwd="/", env=self.environ(), stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def output(self, run: str) -> str:
        return (self.folder / f"{run}.out").read_text()

    def shutdown(self) -> None:
        self._process.communicate(timeout=60)  # closes its input, at which it ends the cluster

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "job.py").write_text(SMALL_JOB)
    made = RayCluster(folder, 2)
    yield made
    made.shutdown()


@pytest.fixture(autouse=True)
def nothing_left(cluster: RayCluster) -> Iterator[None]:
    """A training whose test has failed does not keep the cluster from the next one."""
    yield
    for process in cluster.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def digest(cluster: RayCluster) -> str:
    """The digest of the same training on this machine, with two ranks and without any interruption."""
    command = Shop.command("train", "job.py", "--ranks", "2", "--run-dir", "here", "--device", "cpu", *EXACT)
    done = subprocess.run(
        command,
        cwd=cluster.folder,
        env={**cluster.environ(), "PAUSE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return weights(cluster, "here")


def weights(cluster: RayCluster, run: str) -> str:
    return str(json.loads((cluster.folder / run / "weights.json").read_text())["digest"])


def steps_of_attempts(cluster: RayCluster, run: str) -> list[tuple[int, int]]:
    """The first and the last step that each attempt has computed, from the events of the run."""
    logs = sorted((cluster.folder / run / "logs").glob("attempt-*"), key=lambda path: int(path.name.split("-")[1]))
    found = []
    for log in logs:
        text = (log / "rank-0.log").read_text() if (log / "rank-0.log").exists() else ""
        steps = [int(step) for step in re.findall(r"^step (\d+)", text, re.MULTILINE)]
        if steps:
            found.append((steps[0], steps[-1]))
    return found


def wait_until(is_true: Callable[[], bool], what: str, process: "subprocess.Popen[str]", seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert process.poll() is None, f"ended before {what}"
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def wait_for_step(cluster: RayCluster, run: str, step: int, process: "subprocess.Popen[str]") -> None:
    def newest() -> int:
        steps = steps_of_attempts(cluster, run) if (cluster.folder / run / "logs").exists() else []
        return steps[-1][1] if steps else 0

    wait_until(lambda: newest() >= step, f"step {step}", process)


def node_processes(run: str) -> list[psutil.Process]:
    """The agents of a run, which the workers of Ray have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "paceline.launch.ray.node_process" in words and run in words:
            found.append(process)
    return found


def report(text: str) -> None:
    """What the test has measured, for `pytest -s`."""
    print(f"\n  {text}", flush=True)


def test_a_killed_worker_is_replaced_and_the_weights_are_those_of_one_machine(cluster: RayCluster, digest: str) -> None:
    started = time.monotonic()
    process = cluster.start("killed", "--nodes", "2", "--ranks-per-node", "1", "--checkpoint.every", "15")
    wait_for_step(cluster, "killed", 40, process)
    agents = node_processes("killed")
    assert len(agents) == 2
    worker = agents[-1].parent()
    assert worker is not None
    worker.kill()
    killed = time.monotonic()
    wait_until(lambda: len(steps_of_attempts(cluster, "killed")) > 1, "the second attempt", process)
    report(f"kill -9 of a Ray worker: {time.monotonic() - killed:.0f} s to the next step")
    assert not any(agent.is_running() for agent in agents)
    assert process.wait(240) == 0, cluster.output("killed")
    assert weights(cluster, "killed") == digest
    report(f"digest {digest[:8]}, attempts {steps_of_attempts(cluster, 'killed')}, {time.monotonic() - started:.0f} s")


def test_a_resize_and_a_drained_machine_lose_no_step(cluster: RayCluster, digest: str) -> None:
    """From 2 ranks to 4, and back to 2. Nothing is saved but when Ray asks for it."""
    started = time.monotonic()
    process = cluster.start(
        "elastic", "--nodes", "1:2", "--ranks-per-node", "2", "--using", "resize_seconds=5", *SAVED_ONLY_WHEN_ASKED
    )
    wait_for_step(cluster, "elastic", 20, process)
    cluster.do("add 2")
    wait_until(lambda: len(steps_of_attempts(cluster, "elastic")) == 2, "4 ranks", process)
    second = steps_of_attempts(cluster, "elastic")[1][0]
    wait_for_step(cluster, "elastic", second + 15, process)
    cluster.do("drain")
    wait_until(lambda: not node_processes("elastic"), "the end of the drained nodes", process)
    cluster.do("remove")
    wait_until(lambda: len(steps_of_attempts(cluster, "elastic")) == 3, "2 ranks", process)
    assert process.wait(300) == 0, cluster.output("elastic")
    attempts = steps_of_attempts(cluster, "elastic")
    report(f"2, 4 and 2 ranks: attempts {attempts}, {time.monotonic() - started:.0f} s")
    assert rank_counts(cluster, "elastic") == [2, 4, 2]
    for before, after in pairwise(attempts):
        assert after[0] == before[1] + 1, attempts
    assert weights(cluster, "elastic") == digest
    report(f"digest {digest[:8]}")


def rank_counts(cluster: RayCluster, run: str) -> list[int]:
    """The number of ranks of each attempt."""
    events = [json.loads(line) for line in (cluster.folder / run / "events.jsonl").read_text().splitlines()]
    return [event["ranks"] for event in events if event["event"] == "RunStarted"]


def test_a_stop_signal_saves_and_the_same_script_continues(cluster: RayCluster, digest: str) -> None:
    process = cluster.start("stopped", "--nodes", "2", *SAVED_ONLY_WHEN_ASKED)
    wait_for_step(cluster, "stopped", 20, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, cluster.output("stopped")
    assert cluster.start("stopped", "--nodes", "2", *SAVED_ONLY_WHEN_ASKED).wait(240) == 0, cluster.output("stopped")
    first, second = steps_of_attempts(cluster, "stopped")
    assert second[0] == first[1] + 1 and weights(cluster, "stopped") == digest


@pytest.mark.parametrize(("job", "code"), [("raise ValueError('no job')\n", 2), ("", 2)], ids=["error", "no job"])
def test_a_refusal_ends_the_training_at_once(cluster: RayCluster, job: str, code: int) -> None:
    (cluster.folder / "bad.py").write_text(SMALL_JOB)
    process = cluster.start("bad", "--nodes", "2")
    path = cluster.folder / "bad" / "submit" / "ray_job.py"
    process.kill()
    process.wait()
    (cluster.folder / "bad.py").write_text(job)
    path.write_text(path.read_text().replace("train job.py", "train bad.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path)],
        cwd="/", env=cluster.environ(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "RETRY" not in done.stdout + done.stderr


def test_without_a_cluster_the_script_says_so(cluster: RayCluster) -> None:
    environ = {**cluster.environ(), "RAY_ADDRESS": "127.0.0.1:1"}
    process = cluster.start("alone", "--nodes", "2")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    path = cluster.folder / "alone" / "submit" / "ray_job.py"
    done = subprocess.run(
        [sys.executable, str(path)], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3 and "there is no Ray cluster here" in done.stderr
