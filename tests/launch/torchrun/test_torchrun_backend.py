"""`torchrun --rdzv-backend=paceline`: workers start with torch imported, and end as they do without it."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.torchrun.startup.sitecustomize import worker_arguments
from paceline.launch.torchrun.torchrun_backend import is_paceline_command, rendezvous_creator
from paceline.plugins import resolve
from tests.conftest import SMALL_JOB, Ended, Shop

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--rdzv-backend=paceline"]
SCRIPT = """
import sys
was_imported = "torch" in sys.modules
import json, os, random, signal, time
from pathlib import Path
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
record = {
    "torch": was_imported, "parent": os.getppid(), "pid": os.getpid(), "argv": sys.argv, "file": __file__,
    "command": sys.orig_argv[1:], "path": sys.path[0], "folder": os.getcwd(), "draw": random.random(),
    "variables": [name for name in os.environ if name.startswith("PACELINE_SCRIPT")],
    "module_path": os.environ.get("PYTHONPATH"), "name": __name__,
}
Path(f"{attempt}-{rank}.json").write_text(json.dumps(record))
"""


@pytest.fixture
def shop(shop: Shop) -> Shop:
    """A folder in which the entry point of this working copy is installed, as `pip install` would do it."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]
    folder = shop.path / "site" / "paceline_here-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-here\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[torchrun.handlers]", *lines]))
    return shop


def environ(shop: Shop) -> dict[str, str]:
    paths = [str(shop.path / "site"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def torchrun(shop: Shop, *words: str) -> Ended:
    return shop.call([*TORCHRUN, *words], environ=environ(shop))


def record(shop: Shop, attempt: int, rank: int) -> Any:
    return json.loads((shop.path / f"{attempt}-{rank}.json").read_text())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.cold
def test_a_script_restarts_after_each_kind_of_end(shop: Shop) -> None:
    ends = """
if rank == "1":
    if attempt == 0: os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 1: raise ValueError("not today")
    while attempt == 2 and not Path("2-0.json").exists(): time.sleep(0.01)  # else rank 0 may find no server
    if attempt == 2: os.kill(os.getppid(), signal.SIGKILL)
    if attempt == 3: sys.exit(3)
    if attempt == 4: os._exit(7)
elif attempt < 5:
    time.sleep(60)
import atexit
atexit.register(print, "the end of", rank)
"""
    shop.write("own.py", SCRIPT + ends)
    ended = torchrun(shop, "--nproc-per-node", "2", "--max-restarts", "5", "own.py", "--lr", "1e-3")
    assert ended.code == 0 and ended.out.split("\n").count("the end of 0") == 1, ended.text
    found = [[record(shop, attempt, rank) for rank in (0, 1)] for attempt in range(6)]
    assert all(one["torch"] for pair in found for one in pair), [
        "each was forked",
        [[one["torch"] for one in pair] for pair in found],
    ]
    servers = [{one["parent"] for one in pair} for pair in found]
    assert all(len(pair) == 1 for pair in servers) and servers[0] == servers[2] != servers[3] == servers[5]
    one = found[0][1]
    assert one["argv"] == ["own.py", "--lr", "1e-3"] and one["command"] == ["-u", "own.py", "--lr", "1e-3"]
    assert one["file"] == str(shop.path / "own.py") and one["path"] == one["folder"] == str(shop.path)
    assert one["variables"] == [] and one["module_path"] == environ(shop)["PYTHONPATH"] and one["name"] == "__main__"
    assert len({one["draw"] for pair in found for one in pair}) == 12, "each draws its own random numbers"
    assert ended.err.count("Traceback") == 1 and "script_server.py" not in ended.err and "runpy" not in ended.err
    for code in ("exitcode: -9", "exitcode: 1)", "exitcode: 3", "exitcode: 7"):
        assert code in ended.err, ended.text
    assert not any(is_running(one["pid"]) or is_running(one["parent"]) for pair in found for one in pair)


def waiting_processes(agent: int) -> list[int]:
    """The processes that torchrun takes for its workers: they only wait for their scripts."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"own.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def start(shop: Shop, *words: str) -> "subprocess.Popen[bytes]":
    """Start torchrun with two ranks, and return when each has written its record and the file `ready-RANK`."""
    with (shop.path / "log").open("w") as log:
        process = subprocess.Popen(
            [*TORCHRUN, "--nproc-per-node", "2", *words, "own.py"], cwd=shop.path, env=shop.environ(environ(shop)),
            stdout=log, stderr=log,
        )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list(shop.path.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None, (shop.path / "log").read_text()
        time.sleep(0.05)
    return process


@pytest.mark.cold
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 1), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.soak)]
)
def test_nothing_is_left_running(shop: Shop, number: int, code: int) -> None:
    child = "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\nPath('ready-' + rank).write_text(str(child.pid))\n"
    shop.write("own.py", SCRIPT + child + "time.sleep(300)\n")
    process = start(shop)
    waiting = waiting_processes(process.pid)
    records = [record(shop, 0, rank) for rank in (0, 1)]
    children = [int((shop.path / f"ready-{rank}").read_text()) for rank in (0, 1)]
    os.kill(process.pid, number)
    assert process.wait(timeout=60) == code and "Traceback" not in (shop.path / "log").read_text()
    pids = [*waiting, *(one[name] for one in records for name in ("pid", "parent"))]
    pids += children if number == signal.SIGTERM else []
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.05)
    for pid in filter(is_running, children):  # they outlive a killed torchrun, as without the backend
        os.kill(pid, signal.SIGKILL)


@pytest.mark.cold
def test_a_script_ends_with_the_process_that_waits_for_it(shop: Shop) -> None:
    ends = """
Path(f"ready-{rank}").touch()
if attempt == 0: time.sleep(300)
time.sleep(1)
pids = [json.loads(Path(f"0-{rank}.json").read_text())["pid"] for rank in (0, 1)]
states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids if Path(f"/proc/{pid}").exists()]
Path(f"alive-{rank}").write_text(str([state for state in states if state != "Z"]))
"""
    shop.write("own.py", SCRIPT + ends)
    process = start(shop, "--max-restarts", "1")
    os.kill(waiting_processes(process.pid)[0], signal.SIGKILL)
    assert process.wait(timeout=60) == 0, (shop.path / "log").read_text()
    assert [(shop.path / f"alive-{rank}").read_text() for rank in (0, 1)] == ["[]", "[]"]
    assert record(shop, 0, 0)["parent"] == record(shop, 1, 0)["parent"], "the server is still there"


@pytest.mark.cold
def test_a_command_restarts_with_the_same_weights(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB)
    words = [
        "-m",
        "paceline",
        "train",
        "job.py",
        "--train.steps",
        "8",
        "--train.threads",
        "1",
        "--checkpoint.every",
        "1",
    ]
    faults = ["--faults", "kill rank=1 step=4; raise rank=0 step=6 attempt=2"]
    launch = ["--nproc-per-node", "2", "--max-restarts", "2"]
    ended = torchrun(shop, *launch, *words, "--run-dir", "cut", *faults)
    assert ended.code == 0, ended.text
    assert sorted(path.name for path in (shop.path / "cut" / "logs").iterdir()) == [f"attempt-{n}" for n in (1, 2, 3)]
    assert shop.train("whole", "--train.threads", "1", "--checkpoint.every", "1", steps=8).code == 0
    assert shop.digest("cut") == shop.digest("whole")


def test_several_nodes_are_refused(shop: Shop) -> None:
    ended = torchrun(shop, "--nnodes", "1:2", "--rdzv-endpoint", "127.0.0.1:0", "own.py")
    assert ended.code == 1 and "Traceback" not in ended.err, ended.text
    assert "error: --rdzv-backend=paceline works on one node, and --nnodes asks for up to 2." in ended.err


def test_a_failed_command_has_no_frames_of_torchrun_on_its_screen(shop: Shop) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "-m", "paceline", "train"]
    ended = shop.call([*command, "nojob.py"], environ=environ(shop))
    assert ended.code == 1 and "Root Cause" in ended.err and "Traceback" not in ended.err, ended.text
    assert "traceback : error: nojob.py does not exist." in ended.err and len(ended.err.splitlines()) < 30


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python", "-u", "own.py", "--lr", "1"], ["own.py", "--lr", "1"]),
        (["python", "-u", "-m", "own.train", "x"], ["-m", "own.train", "x"]),
        (["python", "own.py"], None),
        (["python", "-u"], None),
        (["python", "-u", "-c", "print()"], None),
        (["python", "-u", "-m"], None),
        (["python", "-c", "from multiprocessing.spawn import spawn_main"], None),
    ],
)
def test_only_what_torchrun_starts_is_run_by_the_server(command: list[str], expected: list[str] | None) -> None:
    assert worker_arguments(command) == expected


def test_only_a_torchrun_of_paceline_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, words = "/usr/bin/torchrun", ["--standalone", "-m", "paceline", "train", "job.py"]
    assert is_paceline_command([launcher, *words])
    assert is_paceline_command(["/lib/torch/distributed/run.py", "--module", "paceline", "train", "job.py"])
    assert not is_paceline_command([launcher, "own.py", "paceline"]) and not is_paceline_command([])
    assert not is_paceline_command(["/usr/bin/own.py", *words]), "a program that only imports torch's rendezvous"
    hook = sys.excepthook
    rendezvous_creator()
    assert sys.excepthook is hook


def test_the_entry_point_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]
    assert resolve(declared["paceline"]) is rendezvous_creator
