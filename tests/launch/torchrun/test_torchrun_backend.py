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
    assert all(one["torch"] for pair in found for one in pair), "each was forked"
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


@pytest.mark.cold
@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [
        ("agent", signal.SIGTERM, 1),
        pytest.param("agent", signal.SIGKILL, -9, marks=pytest.mark.soak),
        ("worker", signal.SIGKILL, 1),
    ],
)
def test_nothing_is_left_running(shop: Shop, victim: str, number: int, code: int) -> None:
    shop.write("own.py", SCRIPT + "os.system('sleep 300 & echo $! > child-' + rank)\ntime.sleep(300)\n")
    command = [*TORCHRUN, "--nproc-per-node", "2", "own.py"]
    log = (shop.path / "log").open("w")
    process = subprocess.Popen(command, cwd=shop.path, env=shop.environ(environ(shop)), stderr=log, text=True)
    shop.started.append(process)
    deadline = time.monotonic() + 60
    while len(list(shop.path.glob("child-*"))) < 2 or not all(p.read_text() for p in shop.path.glob("child-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = [int(path.read_text()) for path in shop.path.glob("child-*")]
    processes = [pid for rank in (0, 1) for pid in (record(shop, 0, rank)["pid"], record(shop, 0, rank)["parent"])]
    waiting = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    worker = next(int(pid) for pid in waiting if b"own.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(process.pid if victim == "agent" else worker, number)
    process.wait(timeout=60)
    log.close()
    text = (shop.path / "log").read_text()
    assert process.returncode == code and "Traceback" not in text, text
    pids = [*processes, *map(int, waiting), *(children if number == signal.SIGTERM else [])]
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.05)
    for pid in filter(is_running, children):  # as with torch's own backends
        os.kill(pid, signal.SIGKILL)


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
