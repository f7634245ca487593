"""The script for Ray, and what it does without a cluster. `test_on_real_ray.py` trains with it."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from paceline.launch.ray.node_process import NodeProcess, StopReason, refusal_to_end
from paceline.submit.ray_script import check_ray_script
from tests.conftest import Ended, Shop

PRINT_RUN = "import sys, runpy; print(runpy.run_path(sys.argv[1])['RUN'])"
MASK_RAY = "import sys, runpy; sys.modules['ray'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"


def submit(shop: Shop, *words: str) -> Ended:
    return shop.run("submit", "job.py", "--to", "ray", "--run-dir", "runs/it's a", *words)


def test_the_script_describes_the_training_and_its_cluster(shop: Shop) -> None:
    done = submit(
        shop, "--nodes", "2:4", "--ranks-per-node", "2", "--hours", "0.5", "--price", "2", "--layout", "ddp",
        "--using", "cpus=3", "resize_seconds=10", "--train.steps", "9", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    made = json.loads(done.out)
    path = Path(made["file"])
    assert path == shop.path / "runs/it's a/submit/ray_job.py"
    assert shlex.split(made["command"]) == ["ray", "job", "submit", "--", "python", str(path)]
    first = path.read_text().splitlines()[0]
    assert first == (
        f"# Trains job.py on 2 to 4 nodes with 2 processes each, by Ray. Hand it in with: {made['command']}"
    )
    printed = shop.call([sys.executable, "-c", PRINT_RUN, str(path)])
    assert printed.code == 0, printed.err
    for part in (
        "command='paceline train job.py --ranks-per-node 2 --run-dir ",
        "--layout ddp --device cuda --train.steps 9",
        f"folder='{shop.path}'",
        "nodes=(2, 4)",
        "resources={'CPU': 6.0, 'GPU': 2.0}",
        "hours=0.5",
        "resize_seconds=10",
    ):
        assert part in printed.out, printed.out


def test_the_largest_possible_cost_is_that_of_the_most_machines(shop: Shop) -> None:
    assert "at most 96.00 for each start: 4 machines" in submit(shop, "--nodes", "2:4", "--price", "1").out


def test_a_script_without_ray_says_what_to_install(shop: Shop) -> None:
    assert submit(shop, "--device", "cpu").code == 0
    done = shop.call([sys.executable, "-c", MASK_RAY, str(shop.path / "runs/it's a/submit/ray_job.py")])
    assert done.code == 3, done.err
    assert "Ray" in done.err and "pip install 'paceline[ray]'" in done.err


def test_a_script_whose_folder_is_not_on_this_machine_is_refused(shop: Shop) -> None:
    assert submit(shop, "--device", "cpu").code == 0
    path = shop.path / "runs/it's a/submit/ray_job.py"
    path.write_text(path.read_text().replace(f"folder='{shop.path}'", "folder='/nowhere'"))
    done = shop.call([sys.executable, str(path)])
    assert done.code == 2 and "the working folder /nowhere does not exist here" in done.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RayRun(", "line 1: '(' was never closed"),
        ("print()", "there must be one RayRun(...), and there are 0"),
        ("RayRun(nodes=here())", "line 1: nodes is no plain value"),
    ],
)
def test_a_script_that_python_or_ray_would_refuse_is_found(text: str, says: str) -> None:
    assert check_ray_script(text) == [says]


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        (ExitCode.DONE, StopReason.NONE, ""),
        (ExitCode.FAILED, StopReason.NONE, ""),
        (ExitCode.REFUSED, StopReason.NONE, ""),
        (ExitCode.STOPPED, StopReason.NONE, "another node is lost"),
        (-signal.SIGKILL, StopReason.NONE, "killed by SIGKILL"),
        (ExitCode.STOPPED, StopReason.REQUEST, ""),
        (ExitCode.STOPPED, StopReason.SHUTDOWN, ""),
        (ExitCode.STOPPED, StopReason.DRAIN, "Ray drains a machine"),
        (ExitCode.DONE, StopReason.DRAIN, ""),
    ],
)
def test_only_a_lost_node_is_started_again(code: int, reason: StopReason, says: str) -> None:
    text = refusal_to_end(int(code), reason)
    assert says in text and bool(text) is bool(says)


def test_a_node_is_asked_to_save_once_and_stops(shop: Shop) -> None:
    words = ["train", "job.py", "--nodes", "1:127.0.0.1", "--ranks-per-node", "1", "--run-dir", "runs/b",
             "--device", "cpu", "--train.steps", "100000", "--watch.to", "console,jsonl"]  # fmt: skip
    node = NodeProcess(words, folder=str(shop.path))
    try:
        log = shop.path / "runs/b/metrics.jsonl"
        for _ in range(600):
            if node.wait(0.1) is not None or (log.exists() and log.read_text()):
                break
        assert node.ask_to_stop(StopReason.SHUTDOWN) and not node.ask_to_stop(StopReason.DRAIN)
        assert node.stop_reason is StopReason.SHUTDOWN
        assert node.wait(60) == ExitCode.STOPPED
        assert list((shop.path / "runs/b/checkpoints").glob("step-*"))
        assert not node.ask_to_stop(StopReason.DRAIN)
    finally:
        node.ask_to_stop(StopReason.SHUTDOWN)


def test_a_node_ends_with_the_worker_that_has_started_it(shop: Shop) -> None:
    code = (
        "import sys, time; from paceline.launch.ray.node_process import NodeProcess\n"
        "node = NodeProcess(['train', 'job.py', '--nodes', '2:127.0.0.1:1', '--node', '1', '--nodes.wait', '60'], folder='.')\n"
        "print(node._process.pid, flush=True); node.wait(1.5); print(node.wait(0), flush=True); time.sleep(60)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=shop.path, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    assert worker.stdout.readline().strip() == "None"
    worker.kill()
    worker.communicate()
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError("the node outlives its worker")
