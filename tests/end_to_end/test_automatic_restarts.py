"""A run that restarts by itself after faults: it ends with the same bits, says what happened, and leaves nothing behind."""

import json
import os
import random
import re
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest

from paceline.launch.agent.forkserver import _fork_spare
from tests.conftest import SMALL_JOB, Shop
from tests.end_to_end.run_processes import children, marked_processes, spare_of, starter_of, wait_until_gone
from tests.end_to_end.test_interrupted_runs import wait_for

STEPS = 16
LAYOUTS = {
    "ddp": (2, ("--layout", "ddp")),
    "zero2": (2, ("--layout", "zero2")),
    "fsdp": (2, ("--layout", "fsdp")),
    "pp": (2, ("--layout", "pp=2")),
    "tp": (2, ("--layout", "tp=2")),
    "pp x fsdp": (4, ("--layout", "pp=2,dp_shard=2")),
    "pipedream": (2, ("--update", "pipedream")),
    "local": (2, ("--update", "local,every=2")),
    "ps": (3, ("--update", "ps,staleness=0")),
}
BLOCKS = """
class Net(nn.Module):
    def __init__(self, norm, dropout):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 16), nn.Tanh())]
            + [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
            + [nn.Linear(16, 4)]
        )
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


DAMAGE_IN_MEMORY = """
import json
from pathlib import Path

if Path("cut/logs/attempt-2").exists():  # each rank imports this before it looks for a checkpoint
    request = json.loads(Path("cut/logs/attempt-1/request.json").read_text())
    for path in Path(request["payload"]["memory_folder"]).glob("step-*/*.safetensors"):
        content = path.read_bytes()
        path.unlink(missing_ok=True)
        path.write_bytes(content[:-1])
"""


def job_of_blocks() -> str:
    """The small job with a model that every layout can split."""
    head, _, rest = SMALL_JOB.partition("def loss(")
    return f"{head[: head.index('class Net')]}\n{BLOCKS}\n\ndef loss({rest}"


def restarts(shop: Shop, run: str) -> list[dict[str, object]]:
    """The events of the run's restarts."""
    events = [json.loads(line) for line in (shop.path / run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "Restarted"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("ddp", "pp") else pytest.mark.soak) for n in LAYOUTS]
)
def test_two_kills_in_one_command_change_no_bit(shop: Shop, name: str) -> None:
    ranks, words = LAYOUTS[name]
    shop.write("job.py", job_of_blocks())
    more = (*words, "--train.micro_batch_size", "2", "--checkpoint.every", "3")
    whole = shop.train("whole", *more, ranks=ranks, steps=STEPS)
    assert whole.code == 0, whole.text
    second = 0 if name == "ps" else 1  # rank 1 is a worker under ps, which comes back without a restart of the others
    faults = f"kill rank=0 step=7; kill rank={second} step=12 attempt=2"
    cut = shop.train("cut", *more, "--faults", faults, ranks=ranks, steps=STEPS)
    assert cut.code == 0, cut.text
    assert shop.digest("cut") == shop.digest("whole")
    assert [(e["resumed_step"], e["repeated_steps"]) for e in restarts(shop, "cut")] == [(6, 1), (10, 2)]
    assert cut.out.count("starting ") == cut.out.count("layout: ") == 1, "one start and one banner"
    line = (
        rf"rank {second} killed by SIGKILL at step 12; restarted in \d+\.\d\d s from step 10 \(disk\); 2 steps repeated"
    )
    assert re.search(line, cut.out), cut.out


def test_before_the_first_save_it_begins_again(shop: Shop) -> None:
    words = ("--checkpoint.every", "100")
    assert shop.train("whole", *words).code == 0
    cut = shop.train("cut", *words, "--faults", "kill rank=1 step=5")
    assert cut.code == 0 and "from the first step; 5 steps repeated" in cut.out, cut.text
    assert shop.digest("cut") == shop.digest("whole")


def test_an_exception_is_tried_once_more(shop: Shop) -> None:
    """It happens only once here, as a read from a network disk would fail only once."""
    cut = shop.train("cut", "--checkpoint.every", "2", "--faults", "raise rank=1 step=6")
    assert cut.code == 0, cut.text
    assert "rank 1 failed at step 6: RuntimeError: injected fault: raise at step of step 6; restarted in " in cut.out
    again = "; ".join(f"raise rank=1 step=6 attempt={attempt}" for attempt in (1, 2, 3))
    ended = shop.train("bug", "--checkpoint.every", "2", "--faults", again)
    assert ended.code == 1 and ended.err.startswith("FAILED at step 6. First error: rank 1"), ended.text
    assert "Not restarted again: the same error at step 6 ended the attempt before." in ended.err
    assert ended.err.splitlines()[-1].startswith("Resume: ") and len(restarts(shop, "bug")) == 1


def test_the_job_may_turn_restarts_off(shop: Shop) -> None:
    settings = "        max_grad_norm=1.0, settings={'survive.restarts': 0},\n"
    shop.write("job.py", SMALL_JOB.replace("        max_grad_norm=1.0,\n", settings))
    ended = shop.train("cut", "--checkpoint.every", "2", "--faults", "kill rank=1 step=6")
    assert ended.code == 1 and ended.err.startswith("FAILED at step 6"), ended.text
    assert not (shop.path / "cut" / "logs" / "attempt-2").exists()


def test_restarts_without_progress_come_to_an_end(shop: Shop) -> None:
    faults = "; ".join(f"kill rank=1 step=2 attempt={attempt}" for attempt in range(1, 9))
    ended = shop.train("cut", "--faults", faults)
    assert ended.code == 1 and "restarting in 1 s (restart 3 of 3 without a new checkpoint)" in ended.err, ended.text
    assert "Not restarted again: 3 restarts without a new checkpoint (survive.restarts)." in ended.err
    assert (shop.path / "cut" / "logs" / "attempt-4").exists() and not (shop.path / "cut/logs/attempt-5").exists()


def test_ctrl_c_in_the_pause_before_a_restart_ends_the_run(shop: Shop) -> None:
    shop.write(
        "job.py",
        "import os\n"
        + SMALL_JOB.replace("def forward(self, x):", "def forward(self, x):\n        os.kill(os.getpid(), 9)"),
    )
    process = shop.start("train", "job.py", "--run-dir", "cut", "--survive.restarts", "30", "--train.steps", "9")
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    assert any("restarting in 4 s" in line for line in lines)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "FAILED" in err and time.monotonic() - begun < 3.0, err


@pytest.mark.cold
def test_a_killed_starter_or_fork_server_is_replaced_without_another_import_of_torch(shop: Shop) -> None:
    """A starter is forked again; a spare replaces a server; if both are killed, the command starts another server."""
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "400", "--checkpoint.every", "20",
        "--train.on_nonfinite", "skip", "--survive.restarts", "8", environ={"MARK": mark},
    )  # fmt: skip

    def wait_for_attempt(number: int) -> None:
        wait_for(shop.path / "cut" / "logs" / f"attempt-{number}" / "rank-0.log", "step 1")

    wait_for(shop.path / "cut" / "logs" / "attempt-1" / "rank-0.log", "step 20 ")
    (first,) = children(process.pid)
    os.kill(starter_of(first), signal.SIGKILL)
    wait_for_attempt(2)
    assert children(process.pid) == [first]
    second = spare_of(first)
    os.kill(first, signal.SIGKILL)
    wait_for_attempt(3)
    assert children(process.pid) == [] and starter_of(second)
    third = spare_of(second)
    for pid in (third, second):
        os.kill(pid, signal.SIGKILL)
    wait_for_attempt(4)
    (fourth,) = children(process.pid)
    os.kill(fourth, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    lines = [line for line in (out + err).splitlines() if "restarted in " in line]
    assert len(lines) == 4 and all("the process that starts the ranks ended at step " in line for line in lines), lines
    assert wait_until_gone(mark) == []


@pytest.mark.cold
def test_nothing_outlives_a_command_whose_fork_server_was_replaced(shop: Shop) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "100000", "--checkpoint.every", "20",
        "--checkpoint.memory_every", "5", "--train.on_nonfinite", "skip", environ={"MARK": mark},
    )  # fmt: skip
    wait_for(shop.path / "cut" / "logs" / "attempt-1" / "rank-0.log", "step 20 ")
    (forkserver,) = children(process.pid)
    os.kill(forkserver, signal.SIGKILL)
    wait_for(shop.path / "cut" / "logs" / "attempt-2" / "rank-0.log", "step 40 ")
    assert children(process.pid) == []
    folder = memory_folder(shop, "cut")
    assert folder.exists()
    process.kill()
    process.communicate(timeout=20)
    assert wait_until_gone(mark) == [] and not folder.exists()


@pytest.mark.cold
def test_a_spare_that_does_not_answer_is_replaced_by_another_fork_server(shop: Shop) -> None:
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "300", "--checkpoint.every", "20",
        "--train.on_nonfinite", "skip", environ={"MARK": mark},
    )  # fmt: skip
    wait_for(shop.path / "cut" / "logs" / "attempt-1" / "rank-0.log", "step 20 ")
    (forkserver,) = children(process.pid)
    os.kill(spare_of(forkserver), signal.SIGSTOP)
    os.kill(forkserver, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "restarted 1 time; " in out, out + err
    assert wait_until_gone(mark) == []


@pytest.mark.parametrize("name", ["pidfd_open", "fork"])
def test_a_machine_that_allows_no_spare_is_no_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, name, refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert _fork_spare(os.getppid()) == -1
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.cold
def test_a_fork_server_that_is_killed_between_two_attempts_is_replaced(shop: Shop) -> None:
    faults = "; ".join(f"kill rank=1 step=2 attempt={attempt}" for attempt in (1, 2, 3))
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "8", "--faults", faults
    )
    assert process.stderr is not None
    assert any("restarting in 1 s" in line for line in iter(process.stderr.readline, ""))
    (forkserver,) = children(process.pid)
    os.kill(forkserver, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert sorted(path.name for path in (shop.path / "cut" / "logs").iterdir()) == [
        f"attempt-{n}" for n in (1, 2, 3, 4)
    ]
    assert "Traceback" not in (shop.path / "cut" / "logs" / "attempt-1" / "forkserver.log").read_text()


PROGRAMS = """
import os, pathlib, subprocess

def programs_of_earlier_attempts():
    found = 0
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_text(errors="replace").split("\\0")
            is_program = (entry / "comm").read_text() == "sleep\\n"
        except OSError:
            continue
        is_earlier = "PACELINE_ATTEMPT_FOLDER=" + os.environ["PACELINE_ATTEMPT_FOLDER"] not in environ
        found += is_program and is_earlier and "MARK=" + os.environ["MARK"] in environ
    return found

if "PACELINE_ATTEMPT_FOLDER" in os.environ:
    with open("found.txt", "a") as file:
        file.write(f"{programs_of_earlier_attempts()}\\n")
    subprocess.Popen(["sleep", "600"])
"""


def test_what_a_dead_attempt_started_is_gone_before_the_next_one_begins(shop: Shop) -> None:
    """A program that the job started may hold a port or a file that the next attempt needs too."""
    mark = f"MARK{uuid.uuid4().hex}"
    shop.write("job.py", PROGRAMS + SMALL_JOB)
    ended = shop.run(
        "train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "12", "--data.workers", "1",
        "--checkpoint.every", "2", "--faults", "kill rank=1 step=6; kill rank=0 step=9 attempt=2", environ={"MARK": mark},
    )  # fmt: skip
    assert ended.code == 0 and ended.out.count("; restarted in ") == 2, ended.text
    assert (shop.path / "found.txt").read_text().split() == ["0"] * 6
    assert wait_until_gone(mark) == []


def test_a_script_restarts_too(shop: Shop) -> None:
    script = """
import paceline as pl
from job import make_job

with pl.Run(make_job(), ranks=2, run_dir="NAME", settings={"train.steps": 12, "checkpoint.every": 2}) as run:
    for batch in run.batches():
        if "NAME" == "cut" and run.rank == 1 and run._task.attempt < 3 and run._session.loop.cursor.step == 5:
            import os
            os.kill(os.getpid(), 9)
        run.step(batch)
"""
    for name in ("whole", "cut"):
        shop.write(f"{name}.py", script.replace("NAME", name))
        ended = shop.call([sys.executable, f"{name}.py"])
        assert ended.code == 0, ended.text
    assert ended.out.count("rank 1 killed by SIGKILL at step 6; restarted in ") == 2, ended.text
    assert shop.digest("cut") == shop.digest("whole")


@pytest.mark.soak
@pytest.mark.cold
@pytest.mark.parametrize("seed", range(8))
def test_kills_from_outside_at_random_moments_change_no_bit(shop: Shop, seed: int) -> None:
    rng, ranks = random.Random(seed), 2 + seed % 2
    words = (
        "train",
        "job.py",
        "--ranks",
        str(ranks),
        "--train.on_nonfinite",
        "skip",
        "--train.steps",
        "400",
        "--checkpoint.every",
        "5",
        "--watch.to",
        "jsonl",
    )
    assert shop.run(*words, "--run-dir", "whole").code == 0
    mark = f"MARK{uuid.uuid4().hex}"
    process = shop.start(*words, "--run-dir", "cut", environ={"MARK": mark})
    until, num_kills = time.monotonic() + 12, 0
    while process.poll() is None and time.monotonic() < until:
        time.sleep(rng.uniform(0.2, 1.5))
        found = [pid for server in children(process.pid) for pid in children(server)]
        if found:
            os.kill(rng.choice(found), signal.SIGKILL)
            num_kills += 1
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and num_kills >= 3, out + err
    assert shop.digest("cut") == shop.digest("whole")
    assert wait_until_gone(mark) == [] and not marked_processes(mark)


@pytest.mark.cold
def test_torchrun_restarts_as_often_as_it_is_told_to(shop: Shop) -> None:
    """Without a word about the run folder: each restart finds the run that the first start created."""
    words = [
        "-m",
        "paceline",
        "train",
        "job.py",
        "--train.steps",
        "12",
        "--train.threads",
        "1",
        "--checkpoint.every",
        "2",
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    faults = "kill rank=1 step=5; kill rank=0 step=9 attempt=2"
    ended = shop.call([sys.executable, *torchrun, *words, "--faults", faults])
    assert ended.code == 0, ended.text
    (run,) = (shop.path / "runs" / "job").iterdir()
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["attempt-1", "attempt-2", "attempt-3"]
    # torchrun may have read the code of a killed process first
    told = re.findall(
        r"^rank (\d) (?:killed by SIGKILL|failed) at step (\d).*; restarted in \S+ s from step (\d)", ended.out, re.M
    )
    assert told == [("1", "5", "4"), ("0", "9", "8")], ended.text
    assert shop.train("whole", "--train.threads", "1", "--checkpoint.every", "2").code == 0
    assert shop.digest(str(run)) == shop.digest("whole")


def memory_folder(shop: Shop, run: str) -> Path:
    """The folder of the run's checkpoints in memory."""
    request = json.loads((shop.path / run / "logs" / "attempt-1" / "request.json").read_text())
    return Path(request["payload"]["memory_folder"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n == "fsdp" else pytest.mark.soak)
        for n in ("ddp", "zero2", "fsdp", "pp", "tp", "pp x fsdp")
    ],
)
def test_a_restart_from_memory_changes_no_bit(shop: Shop, name: str) -> None:
    ranks, words = LAYOUTS[name]
    shop.write("job.py", job_of_blocks())
    more = (*words, "--train.micro_batch_size", "2", "--checkpoint.every", "100")
    whole = shop.train("whole", *more, ranks=ranks, steps=STEPS)
    assert whole.code == 0, whole.text
    faults = "kill rank=0 step=7; kill rank=1 step=12 attempt=2"
    cut = shop.train("cut", *more, "--checkpoint.memory_every", "2", "--faults", faults, ranks=ranks, steps=STEPS)
    assert cut.code == 0, cut.text
    assert shop.digest("cut") == shop.digest("whole")
    found = [(event["source"], event["resumed_step"]) for event in restarts(shop, "cut")]
    assert found == [("memory", 6), ("disk", 10)]  # step 10 was the best and is on disk
    assert not (shop.path / "cut" / "checkpoints" / "step-00000006").exists()
    assert not memory_folder(shop, "cut").exists()


@pytest.mark.cold
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_restart_before_the_first_save_keeps_the_checkpoint_that_was_named(shop: Shop, is_damaged: bool) -> None:
    """From memory, if that is sound, and else from the named checkpoint; never from step 0."""
    assert shop.train("base", "--checkpoint.every", "4", ranks=2, steps=4).code == 0
    named = ("--resume", "base/checkpoints/step-00000004")
    whole = shop.train("whole", *named, ranks=2, steps=STEPS)
    assert whole.code == 0, whole.err
    more = (*named, "--checkpoint.every", "100", "--eval.every", "100", "--checkpoint.memory_every", "2")
    if is_damaged:
        shop.write("job.py", SMALL_JOB + DAMAGE_IN_MEMORY)
    cut = shop.train("cut", *more, "--faults", "kill rank=1 step=9", ranks=2, steps=STEPS)
    assert cut.code == 0, cut.err
    assert [(event["source"], event["resumed_step"]) for event in restarts(shop, "cut")] == [
        ("disk", 4) if is_damaged else ("memory", 8)
    ]
    assert shop.digest("cut") == shop.digest("whole")


def test_checkpoints_in_memory_outlive_the_fork_server_and_not_the_command(shop: Shop) -> None:
    words = ("--checkpoint.every", "100000", "--eval.every", "100000", "--checkpoint.memory_every", "5")
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "100000", *words,
        "--train.on_nonfinite", "skip",
    )  # fmt: skip
    log = shop.path / "cut" / "logs" / "attempt-1" / "rank-0.log"
    wait_for(log, "step 20 ")
    (forkserver,) = children(process.pid)
    os.kill(forkserver, signal.SIGKILL)
    until = time.monotonic() + 30
    while time.monotonic() < until and not restarts(shop, "cut"):
        time.sleep(0.05)
    (event,) = restarts(shop, "cut")
    assert event["source"] == "memory" and int(str(event["resumed_step"])) >= 10
    folder = memory_folder(shop, "cut")
    assert any(folder.glob("step-*"))
    process.kill()
    process.communicate(timeout=20)
    while time.monotonic() < until and folder.exists():
        time.sleep(0.05)
    assert not folder.exists()


@pytest.mark.cold
def test_a_stopped_fork_server_is_woken(shop: Shop) -> None:
    """Stopped before it has started a rank, or between two attempts: nothing else would ever end that."""
    process = shop.start("train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "12")
    until = time.monotonic() + 20
    while not children(process.pid) and time.monotonic() < until:
        time.sleep(0.005)
    (forkserver,) = children(process.pid)
    os.kill(forkserver, signal.SIGSTOP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err


@pytest.mark.cold
def test_a_stopped_fork_server_does_not_hide_a_killed_rank(shop: Shop) -> None:
    process = shop.start(
        "train", "job.py", "--ranks", "2", "--run-dir", "cut", "--train.steps", "200", "--checkpoint.every", "20",
        "--train.on_nonfinite", "skip",
    )  # fmt: skip
    wait_for(shop.path / "cut" / "logs" / "attempt-1" / "rank-0.log", "step 20 ")
    (forkserver,) = children(process.pid)
    os.kill(forkserver, signal.SIGSTOP)
    os.kill(children(starter_of(forkserver))[1], signal.SIGKILL)
    begun = time.monotonic()
    wait_for(shop.path / "cut" / "logs" / "attempt-2" / "rank-0.log", "step 1")
    assert time.monotonic() - begun < 15.0, "it was killed after 30 s, and another one imported torch"
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and f"process {forkserver}, which starts the ranks, was stopped" in err, out + err
    assert "restarted 1 time; " in out


def test_no_space_for_the_next_attempt_ends_the_run_and_names_the_fault(shop: Shop) -> None:
    """The folder of the logs becomes a file, as a full disk would refuse another folder."""
    code = "import os, pathlib, shutil\nRANK, STEP = int(os.environ.get('RANK', 0)), [0]\n" + SMALL_JOB.replace(
        "    def forward(self, x):\n",
        "    def forward(self, x):\n        STEP[0] += self.training\n"
        "        if RANK == 1 and STEP[0] == 6:\n"
        "            pathlib.Path('cut/logs').rename('cut/gone'); pathlib.Path('cut/logs').touch(); os.kill(os.getpid(), 9)\n",
    )
    shop.write("job.py", code)
    ended = shop.train("cut", "--checkpoint.every", "2")
    assert ended.code == 1 and ended.err.startswith("FAILED"), ended.text
    assert "SIGKILL" in ended.err and "Not restarted: " in ended.err and "Resume: " in ended.err, ended.err
